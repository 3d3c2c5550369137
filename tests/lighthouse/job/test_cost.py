"""How much work a round and an event are: torchft's grows with the square of the groups (its defect 12).

Counted in bytecode instructions, which are the same on every machine.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from lighthouse.job.events import QuorumEffect, QuorumEvent, QuorumFormed, Withdrawn
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig
from lighthouse_protocol.messages.session import QuorumPhase
from tests.calls import calls_of
from tests.lighthouse.builders import beat, join
from tests.lighthouse.sessions import asks, connected, held, left, native, opened, pulse, record_of, standing


def count(work: Callable[[], object]) -> int:
    """Loops and comprehensions included."""
    total = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return total


def trained(groups: int) -> tuple[QuorumMachine, list[str]]:
    names = [f"g{n:05}" for n in range(groups)]
    m = QuorumMachine(QuorumConfig(heartbeat_timeout_s=10))
    for name in names:
        m.handle(beat(name), now=0)
    play(m, names, now=0, first_call=0)
    assert len(m.quorum.participants) == groups
    return m, names


def play(m: QuorumMachine, names: list[str], now: float, first_call: int, **fields: object) -> list[QuorumFormed]:
    """One round: everybody beats and asks."""
    effects: list[QuorumFormed] = []
    for call, name in enumerate(names, start=first_call):
        effects += m.handle(beat(name, str(fields.get("incarnation", "i1"))), now)
        effects += m.handle(join(call, name, **fields), now)
    return effects


def first(groups: int) -> None:
    trained(groups)


def steady(groups: int) -> None:
    m, names = trained(groups)
    for step in range(1, 4):
        assert len(play(m, names, step / 10, step * 10_000, step=step)) == 1


def failed(groups: int) -> None:
    m, names = trained(groups)
    assert play(m, names, 1, 10_000, commit_failures=1)[0].is_new


def stragglers(groups: int) -> None:
    """Half of them hang, beating."""
    m, names = trained(groups)
    play(m, names[: groups // 2], 1, 10_000, step=1)
    for now in (9, 17, 25, 33, 41, 49, 57):
        for name in names:
            assert not m.handle(beat(name), now)
    [effect] = m.tick(61)
    assert len(effect.quorum.participants) == groups // 2


def shrinking(groups: int) -> None:
    m, names = trained(groups)
    assert len(play(m, names, 1, 10_000, step=1, shrink_only=True)) == 1


def restarted(groups: int) -> None:
    m, names = trained(groups)
    m.tick(20)
    for name in names:
        m.handle(beat(name, "i2"), now=20)
    play(m, names, 20, 10_000, incarnation="i2")
    assert len(m.quorum.participants) == groups


def replaced(groups: int) -> None:
    """All are dead; as many others come, while one more only beats."""
    m, names = trained(groups)
    m.tick(20)
    m.handle(beat("late"), now=20)
    play(m, [f"new-{name}" for name in names], 20, 10_000)
    for name in names:
        m.handle(beat(f"new-{name}"), now=24)
    m.handle(join(99_999, "late"), now=24)
    assert len(m.quorum.participants) == groups + 1


class Driven(QuorumMachine):
    """As by its driver: after each event it is asked when to be called next."""

    def handle(self, event: QuorumEvent, now: float) -> Sequence[QuorumEffect]:
        effects = super().handle(event, now)
        self.deadline(now)
        return effects


def with_sessions(groups: int) -> tuple[QuorumMachine, list[str]]:
    """By session and call 1, 2, ... of each; their quorum stands."""
    names = [f"g{n:05}" for n in range(groups)]
    m = Driven(QuorumConfig(heartbeat_timeout_s=10))
    for number, name in enumerate(names, start=1):
        m.handle(opened(number, name), 0)
    for number, name in enumerate(names, start=1):
        m.handle(asks(number, number, name), 0)
    assert m.standing.phase is QuorumPhase.STANDING
    return m, names


def all_tell(m: QuorumMachine, names: list[str], **report: object) -> None:
    for session in range(1, len(names) + 1):
        m.handle(pulse(session, **report), 1)


def all_ask_again(m: QuorumMachine, names: list[str]) -> None:
    for session, name in enumerate(names, start=1):
        m.handle(asks(50_000 + session, session, name, step=6, tag_quorum_id=1, seen_quorum_id=1), 1)


def with_a_newcomer(groups: int) -> None:
    m, names = with_sessions(groups)
    m.handle(opened(99_999, "new"), 1)
    m.handle(asks(99_999, 99_999, "new"), 1)
    all_tell(m, names, held=held(1, "recalled", 5))
    assert m.standing.phase is QuorumPhase.RESUMED
    all_ask_again(m, names)
    assert len(m.quorum.participants) == groups + 1


def without_one_that_drains(groups: int) -> None:
    m, names = with_sessions(groups)
    m.handle(pulse(1, held=held(1), drains=True), 1)
    all_tell(m, names, held=held(1, "recalled", 5), drains=False)
    m.handle(pulse(1, held=held(1, "leaving", 5)), 1)
    m.handle(left(1), 1)
    all_ask_again(m, ["gone", *names[1:]])
    assert len(m.quorum.participants) == groups - 1


def back_at_another_lighthouse(groups: int) -> None:
    before, names = with_sessions(groups)
    m = Driven(QuorumConfig(heartbeat_timeout_s=10), record=record_of(before), holders_until=5.0)
    for session, name in enumerate(names, start=1):
        m.handle(opened(session, native(name, 5, seen_quorum_id=1), held=held(1, granted=5)), 1)
    assert m.standing.phase is QuorumPhase.STANDING


ROUNDS: dict[str, Callable[[int], None]] = {
    work.__name__: work
    for work in (
        first,
        steady,
        failed,
        stragglers,
        shrinking,
        restarted,
        replaced,
        with_a_newcomer,
        without_one_that_drains,
        back_at_another_lighthouse,
    )
}


@pytest.mark.parametrize("story", ROUNDS)
def test_a_round_costs_no_square_of_the_groups(story: str):
    """Three times the groups, about three times the work (sorting adds a little)."""
    work = {groups: count(lambda groups=groups: ROUNDS[story](groups)) for groups in (100, 300)}
    assert work[300] < 4 * work[100]


@pytest.mark.parametrize("shrinking", [False, True])
def test_an_event_that_changes_nothing_costs_the_same_among_many(shrinking: bool):
    def cost(groups: int) -> int:
        m, names = trained(groups)
        m.handle(join(10_000, names[0], shrink_only=shrinking), now=1)
        for name in names[1 : groups // 2]:
            m.handle(join(10_000 + int(name[1:]), name, step=1), now=1)
        return max(
            count(lambda e=e: m.handle(e, 1)) for e in (beat(names[-1]), beat(names[1]), Withdrawn("g00000", 77_777))
        )

    assert cost(400) <= 1.2 * cost(100)


def test_one_message_of_a_job_with_two_groups_calls_few_functions():
    machine, no_news = standing("ab", kind=QuorumMachine), pulse(1, held=held(1, granted=3))
    assert calls_of(lambda: machine.handle(no_news, 0.5)) <= 12, "a heartbeat without news"
    alone, hello = connected("a", kind=QuorumMachine), opened(2, native("b"))
    assert calls_of(lambda: alone.handle(hello, 0.5)) <= 60, "a hello"
    for step in (0, 5):
        machine, ask = connected("ab", kind=QuorumMachine), asks(2, 2, "b", step=step)
        machine.handle(asks(1, 1, "a", step=step), 0.5)
        assert calls_of(lambda m=machine, a=ask: m.handle(a, 0.5)) <= 150, "a join that forms the quorum"
        assert machine.quorum is not None


@pytest.mark.parametrize("has_newcomer", [False, True])
def test_a_heartbeat_of_a_session_costs_the_same_among_many(has_newcomer: bool):
    """While the quorum stands, and while it is recalled."""

    def cost(groups: int) -> int:
        m, _ = with_sessions(groups)
        if has_newcomer:
            m.handle(opened(99_999, "new"), 1)
            m.handle(asks(99_999, 99_999, "new"), 1)
        beat = pulse(2, 7, held=held(1, "recalled", 5) if has_newcomer else held(1, granted=5))

        m.handle(beat, 1)  # what is looked at once, is
        return count(lambda: m.handle(beat, 1))

    assert cost(400) <= 1.2 * cost(100)


def test_the_count_would_notice_a_square():
    def square(groups: int) -> int:
        return sum(1 for _ in range(groups) for _ in range(groups))

    assert count(lambda: square(40)) > 8 * count(lambda: square(10))
