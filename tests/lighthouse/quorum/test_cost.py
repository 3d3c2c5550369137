"""How much work a round and an event are: torchft's grows with the square of the groups (its defect 12).

Counted in bytecode instructions, which are the same on every machine.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import QuorumFormed, Withdrawn
from lighthouse.quorum.rules.machine import QuorumMachine
from tests.lighthouse.builders import beat, join


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


ROUNDS: dict[str, Callable[[int], None]] = {
    work.__name__: work for work in (first, steady, failed, stragglers, shrinking, restarted, replaced)
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
        return max(count(lambda e=e: m.handle(e, 1)) for e in (beat(names[-1]), beat(names[1]), Withdrawn(77_777)))

    assert cost(400) <= 1.2 * cost(100)


def test_the_count_would_notice_a_square():
    def square(groups: int) -> int:
        return sum(1 for _ in range(groups) for _ in range(groups))

    assert count(lambda: square(40)) > 8 * count(lambda: square(10))
