"""What the end of a rank means, and what is answered to a loss."""

import dataclasses
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.guard.rules.exit_status import described
from manager.supervisor.rules.restart_policy import (
    Decision,
    Exclude,
    GiveUp,
    Outcome,
    Restart,
    RestartBudget,
    RestartPolicy,
    outcome,
)

PLAIN = RestartPolicy(max_startup_failures=0)


def lose(policy: RestartPolicy, *losses: tuple[float, float], host: int = 0, drawn: float = 1.0) -> list[Decision]:
    """Losses as (when, how long after the start)."""
    budget = RestartBudget(policy, lambda: drawn)
    return [budget.lose(host, lived_s, at) for at, lived_s in losses]


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (0, Outcome.DONE),
        (130, Outcome.ABORT),
        (-signal.SIGINT, Outcome.ABORT),
        (1, Outcome.LOST),
        (2, Outcome.LOST),
        (137, Outcome.LOST),
        (-signal.SIGSEGV, Outcome.LOST),
        (-signal.SIGABRT, Outcome.LOST),
        (-signal.SIGKILL, Outcome.LOST),
        (-signal.SIGTERM, Outcome.LOST),
    ],
)
def test_what_an_end_means(status: int, meaning: Outcome) -> None:
    assert outcome(status, stop_exit_code=130) is meaning


def test_the_abort_code_is_an_option() -> None:
    """A death by SIGINT is no exit code, and means what it means."""
    assert [outcome(status, 77) for status in (77, 130, -2)] == [Outcome.ABORT, Outcome.LOST, Outcome.ABORT]
    assert [outcome(status, 0) for status in (0, 130, -2)] == [Outcome.DONE, Outcome.LOST, Outcome.ABORT]


def test_an_end_is_named() -> None:
    assert [described(status) for status in (0, 1, -11, -9, -64)] == [
        "exit code 0",
        "exit code 1",
        "SIGSEGV",
        "SIGKILL (kill -9, or the kernel was out of memory)",
        "SIGRTMAX",
    ]
    assert described(-100) == "signal 100"


class TestBudget:
    def test_each_restart_waits_twice_as_long_up_to_a_bound(self) -> None:
        policy = dataclasses.replace(PLAIN, max_restarts=5, delay_s=1.0, max_delay_s=5.0)
        decisions = lose(policy, *((100.0 * i, 60.0) for i in range(5)))
        assert decisions == [Restart(1.0), Restart(2.0), Restart(4.0), Restart(5.0), Restart(5.0)]

    def test_jitter_takes_up_to_half(self) -> None:
        assert lose(PLAIN, (0.0, 60.0), drawn=0.0) == [Restart(0.25)]

    def test_it_is_exhausted_by_one_more_than_it_has(self) -> None:
        decisions = lose(dataclasses.replace(PLAIN, max_restarts=2), (0, 60), (100, 60), (200, 60))
        reason = "the budget of 2 restarts within 3600 s is exhausted"
        assert decisions[2] == GiveUp(reason, is_for_all=True)

    def test_none_at_all(self) -> None:
        decision = lose(dataclasses.replace(PLAIN, max_restarts=0), (0, 60))
        assert decision == [GiveUp("the budget of 0 restarts within 3600 s is exhausted", is_for_all=True)]

    def test_what_left_the_window_counts_no_more(self) -> None:
        policy = dataclasses.replace(PLAIN, max_restarts=1, window_s=10.0)
        decisions = lose(policy, (0, 60), (10, 60), (19.9, 60))
        assert [type(decision) for decision in decisions] == [Restart, Restart, GiveUp]

    def test_deaths_at_the_start_are_not_mended(self) -> None:
        policy = RestartPolicy(max_restarts=9, max_startup_failures=3, startup_s=10.0)
        decisions = lose(policy, (0, 1), (10, 9.9), (20, 0))
        reason = "start-up failure: 3 deaths in a row within 10 s of the start"
        assert decisions[2] == GiveUp(reason, is_for_all=False)

    def test_a_longer_life_between_them_begins_anew(self) -> None:
        policy = RestartPolicy(max_restarts=9, max_startup_failures=2, startup_s=10.0)
        decisions = lose(policy, (0, 1), (10, 10), (20, 1), (30, 1))
        assert [type(decision) for decision in decisions] == [Restart, Restart, Restart, GiveUp]

    def test_a_host_that_is_the_first_to_fail_again_and_again_is_excluded(self) -> None:
        budget = RestartBudget(RestartPolicy(max_restarts=9, max_startup_failures=0, exclude_host_after=2), lambda: 0.5)
        decisions = [budget.lose(host, 60.0, at) for at, host in enumerate((0, 1, 0, 1, 1))]
        assert [type(decision) for decision in decisions] == [Restart] * 4 + [Exclude]
        assert decisions[-1] == Exclude(1, "it was the first to fail 2 times in a row")


class TestAMisfit:
    """Losses of a group that does not fit its peers."""

    POLICY = RestartPolicy(max_startup_failures=0, max_restarts=2)

    def lose(self, *misfits: bool) -> Decision:
        budget = RestartBudget(self.POLICY, lambda: 1.0)
        return [budget.lose(0, 60.0, at, is_misfit=is_misfit) for at, is_misfit in enumerate(misfits)][-1]

    @pytest.mark.parametrize("misfits", [(True, True, True), (True, False, False), (False, False, True)])
    def test_it_is_no_fault_of_the_others(self, misfits: tuple[bool, ...]) -> None:
        why = (
            f"the budget of 2 restarts within 3600 s is exhausted, {sum(misfits)} of them because this group does not "
        )
        assert self.lose(*misfits) == GiveUp(f"{why}fit its peers", is_for_all=False)

    def test_what_does_not_need_it_to_exhaust_the_budget_is(self) -> None:
        assert self.lose(False, False, False) == GiveUp(
            "the budget of 2 restarts within 3600 s is exhausted", is_for_all=True
        )

    def test_it_uses_the_budget_up(self) -> None:
        assert isinstance(self.lose(True, True), Restart)


@given(
    policy=st.builds(
        RestartPolicy,
        max_restarts=st.integers(0, 5),
        window_s=st.floats(1, 100),
        delay_s=st.floats(0.01, 10),
        max_delay_s=st.floats(0.01, 100),
        max_startup_failures=st.integers(0, 4),
        startup_s=st.floats(0.1, 20),
        exclude_host_after=st.integers(0, 4),
    ),
    losses=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 30), st.integers(0, 2)), min_size=1, max_size=20),
    drawn=st.floats(0, 1),
)
def test_no_window_has_more_restarts_than_the_budget(
    policy: RestartPolicy, losses: list[tuple[float, float, int]], drawn: float
) -> None:
    budget, now, restarts = RestartBudget(policy, lambda: drawn), 0.0, list[float]()
    for after_s, lived_s, host in losses:
        now += after_s
        decision = budget.lose(host, lived_s, now)
        if isinstance(decision, Restart):
            assert 0 < decision.after_s <= policy.max_delay_s
            restarts.append(now)
        assert sum(now - at < policy.window_s for at in restarts) <= policy.max_restarts
