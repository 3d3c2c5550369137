"""What a supervisor says again by its next stream to the lighthouse. The client is a dumb one."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import pytest

from lighthouse_protocol.coordinator import Coordinator, parse_coordinator
from lighthouse_protocol.messages.run import (
    HelloRejected,
    ProcessLost,
    RankId,
    SupervisorHeartbeat,
    SupervisorHello,
    SupervisorWelcome,
)
from lighthouse_protocol.refusals import DuplicateReplica, Unreachable
from lighthouse_runtime.timing.pacing import Backoff
from manager.supervisor import lighthouse_link
from manager.supervisor.lighthouse_link import SupervisorLink
from manager.supervisor.rules import restart_policy

LIGHTHOUSE = parse_coordinator("lighthouse:1")
TWO_LIGHTHOUSES = parse_coordinator("lighthouse:1,lighthouse:2")
ENTRY = SupervisorHello("g", "s", "h", (0, 1))
WELCOME = SupervisorWelcome(60.0)
FIRST, SECOND = (ProcessLost(RankId(slot, f"s.{slot}"), "killed by signal 9") for slot in (0, 1))


class Supervisor:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()

    def receive(self, message: object) -> None:
        self.heard.put_nowait(message)

    def heartbeat(self, now: float) -> SupervisorHeartbeat:
        return SupervisorHeartbeat()

    def fail(self, status: int) -> None:
        self.heard.put_nowait(status)


def link_to(
    lighthouse: Callable[[], object],
    supervisor: Supervisor,
    patch: pytest.MonkeyPatch,
    coordinator: Coordinator = LIGHTHOUSE,
) -> SupervisorLink:
    patch.setattr(lighthouse_link, "AsyncLighthouseClient", lambda *_, **__: lighthouse())
    return SupervisorLink(coordinator, "j", "r", ENTRY, supervisor)


class DumbLighthouse:
    """A client and its one stream, which welcomes, and breaks when it is told to."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.breaks = asyncio.Event()
        self._has_welcomed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def supervise(self) -> Self:
        return self

    def send(self, message: Any) -> None:
        self.said += [] if isinstance(message, SupervisorHeartbeat) else [message]

    def end(self) -> None:
        self.breaks.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SupervisorWelcome:
        if not self._has_welcomed:
            self._has_welcomed = True
            return WELCOME
        await self.breaks.wait()
        raise Unreachable("the lighthouse is gone")


class TestLosses:
    async def over_two_streams(self, patch: pytest.MonkeyPatch) -> list[list[Any]]:
        """The first loss is told by a stream that then breaks, the second by the next. What each was told."""
        streams: list[DumbLighthouse] = []

        def connect() -> Any:
            streams.append(DumbLighthouse())
            return streams[-1]

        supervisor = Supervisor()
        link = link_to(connect, supervisor, patch)
        link.open()
        for lost in (FIRST, SECOND):
            assert await asyncio.wait_for(supervisor.heard.get(), 20) == WELCOME
            link.report_loss(lost)
            streams[0].breaks.set()
        await link.close()
        return [stream.said for stream in streams]

    def test_one_that_was_told_just_before_the_stream_broke_is_told_again(self, monkeypatch: pytest.MonkeyPatch):
        assert asyncio.run(self.over_two_streams(monkeypatch)) == [[ENTRY, FIRST], [ENTRY, FIRST, SECOND]]

    def test_one_that_was_told_long_before_is_not(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(restart_policy, "DOUBT_S", -1.0)
        assert asyncio.run(self.over_two_streams(monkeypatch)) == [[ENTRY, FIRST], [ENTRY, SECOND]]


async def test_a_message_that_cannot_be_handled_ends_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor()

    def receive(message: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(supervisor, "receive", receive)
    link = link_to(DumbLighthouse, supervisor, monkeypatch)
    link.open()
    assert await asyncio.wait_for(supervisor.heard.get(), 20) == 1
    await link.close()


class RefusingLighthouse(DumbLighthouse):
    """Another supervisor has that name. It says so, and ends the stream well."""

    async def __anext__(self) -> Any:
        if self._has_welcomed:
            raise StopAsyncIteration
        self._has_welcomed = True
        return HelloRejected(DuplicateReplica("supervisor g on h is there"))


class CountingBackoff(Backoff):
    def __init__(self) -> None:
        super().__init__()
        self.waits, self.resets, self.enough = 0, 0, asyncio.Event()

    def reset(self) -> None:
        self.resets += 1

    async def wait(self) -> None:
        self.waits += 1
        if self.waits == 5:
            self.enough.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize("coordinator", [LIGHTHOUSE, TWO_LIGHTHOUSES])
def test_a_name_that_is_taken_is_asked_for_ever_less_often_and_told_once(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A lighthouse that has started again keeps the names of its supervisors for a while."""
    refusals: list[RefusingLighthouse] = []

    def refusing() -> RefusingLighthouse:
        refusals.append(RefusingLighthouse())
        return refusals[-1]

    async def refused_often() -> CountingBackoff:
        backoff = CountingBackoff()
        monkeypatch.setattr("manager.supervisor.lighthouse_link.Backoff", lambda: backoff)
        link = link_to(refusing, Supervisor(), monkeypatch, coordinator)
        link.open()
        await asyncio.wait_for(backoff.enough.wait(), 20)
        await link.close()
        return backoff

    backoff = asyncio.run(refused_often())
    assert backoff.resets == 0
    assert len(refusals) <= backoff.waits + 1  # it pauses after each refusal
    assert [record.getMessage() for record in caplog.records] == [
        "refused by the lighthouse: supervisor g on h is there; the ranks start when it answers"
    ]
