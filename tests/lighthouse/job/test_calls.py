"""How many Python functions one message runs in the machine of a job with two replica groups."""

import sys
from types import FrameType

import pytest

from lighthouse.job import events
from lighthouse.job.forming import QuorumMachine
from tests.lighthouse.sessions import asks, connected, held, native, opened, pulse, standing


def calls(machine: QuorumMachine, event: events.QuorumEvent, now: float) -> int:
    total = 0

    def count(frame: FrameType, kind: str, arg: object) -> None:
        nonlocal total
        total += kind == "call"

    sys.setprofile(count)
    try:
        machine.handle(event, now)
    finally:
        sys.setprofile(None)
    return total


def test_a_heartbeat_without_news() -> None:
    machine = standing("ab", kind=QuorumMachine)
    assert calls(machine, pulse(1, held=held(1, granted=3)), 0.5) <= 12


def test_a_hello() -> None:
    assert calls(connected("a", kind=QuorumMachine), opened(2, native("b")), 0.5) <= 60


@pytest.mark.parametrize("step", [0, 5])
def test_a_join_that_forms(step: int) -> None:
    machine = connected("ab", kind=QuorumMachine)
    machine.handle(asks(1, 1, "a", step=step), 0.5)
    assert calls(machine, asks(2, 2, "b", step=step), 0.5) <= 150
    assert machine.quorum is not None
