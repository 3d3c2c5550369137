"""What host 0 takes and refuses from the supervisors of the further hosts."""

from typing import Any, cast

import pytest

from lighthouse_protocol.messages.hosts import HostEndAsked
from lighthouse_protocol.messages.preemption import PreemptionNotice, PreemptionReport
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.streams import NODE_REQUESTS
from manager.supervisor.head_host import WorkerHosts


class Head:
    """Takes signals and notices only. Anything else is an AttributeError."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []
        self.notices: list[tuple[str, PreemptionNotice | None, int]] = []

    def handle_notice(self, *given: Any) -> None:
        self.notices.append(given)

    def handle_signal(self, status: int, host: int) -> None:
        self.ends.append((status, host))


def test_only_a_stop_signal_ends_the_group() -> None:
    head = Head()
    nodes = WorkerHosts(cast(Any, head))
    for status in (0, 5, 128, 132, 138, 2**31 - 1, -1):
        with pytest.raises(InvalidRequest, match="status"):
            nodes.receive(1, HostEndAsked(status))
    for status in (143, 130, 129, 131):
        nodes.receive(2, HostEndAsked(status))
    assert head.ends == [(143, 2), (130, 2), (129, 2), (131, 2)]


def test_a_notice_for_another_host_counts_for_the_group() -> None:
    head, notice = Head(), PreemptionNotice("aws", "spot", "node2", 1_800_000_000.0)
    nodes = WorkerHosts(cast(Any, head))
    for report in (PreemptionReport(notice), PreemptionReport(None)):
        nodes.receive(2, NODE_REQUESTS.read(NODE_REQUESTS.write(report)))  # pyright: ignore[reportArgumentType]
    assert head.notices == [("", notice, 2), ("", None, 2)]
