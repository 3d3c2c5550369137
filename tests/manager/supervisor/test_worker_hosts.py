"""What host 0 takes and refuses from the supervisors of the further hosts."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lighthouse_protocol.messages.hosts import FromHost, HostEndAsked, HostHello
from lighthouse_protocol.messages.preemption import PreemptionNotice, PreemptionReport
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.streams import NODE_REQUESTS
from manager.supervisor.head_host import WorkerHosts
from manager.supervisor.rules.events import Event, HostLost, HostReady
from manager.supervisor.rules.machine import Layout


class Head:
    """Host 0 of group a, which has two hosts with one rank each."""

    plan = SimpleNamespace(replica_id="a", run="r", layout=Layout(hosts=2), master=("10.0.0.1", 29500))
    keep_every = 0

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []
        self.notices: list[tuple[str, PreemptionNotice | None, int]] = []
        self.events: list[Event | str] = []

    def feed(self, event: Event) -> None:
        self.events.append(event)

    def lose_notices(self, host: int) -> None:
        self.events.append(f"no notices of host {host}")

    def handle_notice(self, *given: Any) -> None:
        self.notices.append(given)

    def handle_signal(self, status: int, host: int) -> None:
        self.ends.append((status, host))


class Stream:
    """Stream of a supervisor on host 1, which says hello and then nothing until `close`."""

    def __init__(self) -> None:
        self._is_closed = asyncio.Event()
        self.error: Exception | None = None

    async def read_hello(self, *_: Any) -> HostHello:
        return HostHello("a", "r", 1, 2, 1, "i", 0)

    async def __aiter__(self) -> AsyncIterator[FromHost]:
        await self._is_closed.wait()
        for message in ():
            yield message

    def send(self, message: Any) -> None:
        pass

    def end(self, error: Exception) -> None:
        self.error = error
        self.close()

    def close(self) -> None:
        self._is_closed.set()


async def test_notices_end_with_the_supervisor_that_sent_them() -> None:
    """Both when its stream closes, and when its successor connects before that is noticed."""
    head, older, newer = Head(), Stream(), Stream()
    nodes = WorkerHosts(cast(Any, head))

    async with asyncio.TaskGroup() as tasks:
        for stream in (older, newer):
            tasks.create_task(nodes.serve(cast(Any, stream), cast(Any, None), cast(Any, stream)))
            await asyncio.sleep(0)
        newer.close()
    assert str(older.error) == "another supervisor of host 1 has connected"
    assert head.events == [
        HostReady(1),
        "no notices of host 1",
        HostLost(1, "its supervisor was restarted"),
        HostReady(1),
        "no notices of host 1",
        HostLost(1, "its supervisor disconnected"),
    ]


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
