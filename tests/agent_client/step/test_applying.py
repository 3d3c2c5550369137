"""What is known of a commit that was, or was not, applied: what optimizers and scripts do, event by event."""

from collections.abc import Callable

import pytest

from agent_client.step.rules.machine import Applying


def never() -> bool:
    return False


def step(it: Applying, key: int = 1, *, is_registered: bool = True, ends: bool = True) -> None:
    it.optimizer_began(key, "SGD", is_registered=is_registered)
    if ends:
        it.optimizer_ended(key, "SGD", is_registered=is_registered)


def trained(steps: int = 3) -> Applying:
    """A script that steps its optimizer after each commit."""
    it = Applying()
    for number in range(steps):
        assert it.begins(never) == ""
        it.note_commit(number)
        step(it)
    return it


def halves(it: Applying) -> None:
    step(it, ends=False)


def again(it: Applying) -> None:
    """After an exception: the first try may have moved a part of the parameters."""
    step(it, ends=False)
    step(it)


def nested(it: Applying) -> None:
    """The step of a derived class calls its parent's."""
    it.optimizer_began(1, "Mine", is_registered=True)
    step(it)
    it.optimizer_ended(1, "Mine", is_registered=True)


def by_script(it: Applying) -> None:
    """Where the script says when it applies, optimizers are not looked at."""
    it.entered()
    step(it, ends=False)
    it.left()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (step, ""),
        (nested, ""),
        (by_script, ""),
        (halves, "step 3 was committed, and SGD.step() began and did not end"),
        (again, "step 3 was committed, and SGD.step() began and did not end"),
        (lambda it: None, "step 3 was committed, and no optimizer has stepped since"),
    ],
)
def test_what_is_said_once_of_a_commit(act: Callable[[Applying], None], said: str) -> None:
    it = trained()
    it.begins(never)
    it.note_commit(3)
    act(it)
    assert it.begins(never) == said
    assert it.begins(never) == ""


def test_that_a_gradient_scaler_may_skip_is_found_out_once() -> None:
    it, asked = trained(), list[int]()
    for number in range(3, 6):
        it.note_commit(number)
        assert it.begins(lambda number=number: not asked.append(number)) == ""
    assert asked == [3]


@pytest.mark.parametrize("is_registered", [True, False])
def test_optimizers_may_take_turns_registered_or_not(is_registered: bool) -> None:
    it = Applying()
    for number in range(6):
        assert it.begins(never) == ""
        it.note_commit(number)
        step(it, number % 2, is_registered=is_registered or number % 2 == 0)
    assert it.begins(never) == ""


def test_updates_by_hand_are_nobodys_business() -> None:
    it = Applying()
    for number in range(3):
        assert it.begins(never) == ""
        it.note_commit(number)


def test_local_steps_of_a_script_are_its_own() -> None:
    """Between two averages it steps many times, or not at all; and what it breaks there it averages."""
    it = Applying()
    for steps in (3, 2, 0, 0, 1, 0):
        assert it.begins(never) == ""
        it.note_commit(steps)
        for _ in range(steps):
            step(it)
        step(it, ends=False) if steps else None
    it = Applying()
    step(it, ends=False)
    assert it.begins(never) == ""


def test_what_was_not_applied_says_nothing_of_the_next_commit() -> None:
    it = trained()
    it.begins(never)
    it.note_commit(3)
    step(it, ends=False)
    assert it.begins(never) != ""
    it.note_commit(4)
    step(it)
    assert it.begins(never) == ""
