"""What host 0 refuses from the supervisors of the further hosts."""

import pytest

from lighthouse_protocol.messages.hosts import HostEndAsked
from lighthouse_protocol.refusals import InvalidRequest
from manager.supervisor.head_host import WorkerHosts
from manager.supervisor.rules.events import Event
from manager.supervisor.rules.plan import LaunchPlan


def test_only_a_stop_signal_ends_the_group() -> None:
    ends: list[tuple[int, int]] = []
    nodes = WorkerHosts(_no_plan, _no_event, lambda status, host: ends.append((status, host)))
    for status in (0, 5, 128, 132, 138, 2**31 - 1, -1):
        with pytest.raises(InvalidRequest, match="status"):
            nodes.receive(1, HostEndAsked(status))
    for status in (143, 130, 129, 131):
        nodes.receive(2, HostEndAsked(status))
    assert ends == [(143, 2), (130, 2), (129, 2), (131, 2)]


def _no_plan() -> LaunchPlan:
    raise AssertionError


def _no_event(event: Event) -> None:
    raise AssertionError(event)
