"""What a supervisor says again by its next stream to the lighthouse. The client is a dumb one."""

import asyncio
from typing import Any, Self

import pytest

from lighthouse_protocol.messages.run import RankId
from lighthouse_protocol.messages.supervisor import ProcessLost, SupervisorHeartbeat, SupervisorHello, SupervisorWelcome
from lighthouse_protocol.refusals import Unreachable
from manager.supervisor.lighthouse_link import SupervisorLink
from manager.supervisor.rules import report

ENTRY = SupervisorHello("g", "s", "h", (0, 1))
WELCOME = SupervisorWelcome(60.0)
FIRST, SECOND = (ProcessLost(RankId(slot, f"s.{slot}"), "killed by signal 9") for slot in (0, 1))


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
    async def over_two_streams(self) -> list[list[Any]]:
        """The first loss is told by a stream that then breaks, the second by the next. What each was told."""
        streams: list[DumbLighthouse] = []

        def connect() -> Any:
            streams.append(DumbLighthouse())
            return streams[-1]

        heard: asyncio.Queue[object] = asyncio.Queue()
        link = SupervisorLink(connect, "lighthouse", ENTRY, heard.put_nowait)
        link.open()
        for lost in (FIRST, SECOND):
            assert await asyncio.wait_for(heard.get(), 20) == WELCOME
            link.lose(lost)
            streams[0].breaks.set()
        await link.close()
        return [stream.said for stream in streams]

    def test_one_that_was_told_just_before_the_stream_broke_is_told_again(self):
        assert asyncio.run(self.over_two_streams()) == [[ENTRY, FIRST], [ENTRY, FIRST, SECOND]]

    def test_one_that_was_told_long_before_is_not(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(report, "DOUBT_S", -1.0)
        assert asyncio.run(self.over_two_streams()) == [[ENTRY, FIRST], [ENTRY, SECOND]]
