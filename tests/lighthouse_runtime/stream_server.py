"""A server of sessions and watches that does what it is told; also a program, which prints its port."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from lighthouse_protocol.messages.membership import Assignment, Decision
from lighthouse_protocol.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Revoked,
    ToLighthouse,
    ToManager,
    VoteAnswer,
    WatchOpened,
    Welcome,
)
from lighthouse_protocol.pb.documented import manager_pb2
from lighthouse_protocol.refusals import Drained, Superseded, WrongState
from lighthouse_protocol.wire.streams import SESSION_REQUESTS, SESSION_RESPONSES, WATCH_REQUESTS, WATCH_RESPONSES
from lighthouse_runtime.security.access import LoopbackAccess
from lighthouse_runtime.server.grpc_server import Call, GrpcServer, Stream
from lighthouse_runtime.server.streams import Ending, Sender
from tests.processes import LOCALHOST, Process

WELCOME = Welcome(1.0, 5.0)
NEXT = Assignment(7, 0, 1, ("a",), "h:2", 4, 0, 1, 1, "h:1")


class StreamServer:
    """What a session does is told by its leave. `senders`, `heard` and `endings` are of all streams so far.

    `port` is for the one who starts it.
    """

    def __init__(self) -> None:
        self.port = 0
        self.senders: list[Sender] = []
        self.heard: list[ToLighthouse] = []
        self.endings: asyncio.Queue[Ending | None] = asyncio.Queue()
        self.observed: list[tuple[str, str]] = []
        services = {
            "lighthouse.v1.LighthouseService": {"Session": Stream(SESSION_REQUESTS, self.session)},
            "manager.v1.ManagerService": {"Watch": Stream(WATCH_REQUESTS, self.watch)},
        }
        self.server = GrpcServer(
            services, [], LoopbackAccess(), lambda method, status: self.observed.append((method, status.name))
        )

    async def session(self, requests: AsyncIterator[ToLighthouse | None], _: Call, sender: Sender) -> None:
        self.senders.append(sender)
        try:
            async for message in requests:
                if message is not None:
                    self.heard.append(message)
                    await self._answer(message, lambda answer: sender.send(SESSION_RESPONSES.write(answer)))
        finally:
            self.endings.put_nowait(sender.ending)

    async def _answer(self, message: ToLighthouse, send: Callable[[ToManager], None]) -> None:
        match message:
            case Hello():
                send(WELCOME)
            case Heartbeat(number):
                send(HeartbeatAck(number, 1.0))
            case Leave("refuse"):
                send(Goodbye("first"))
                raise Superseded("a newer session has taken its place")
            case Leave("fail"):
                raise ZeroDivisionError("oops")
            case Leave("hush"):
                pass
            case Leave("wait"):
                await asyncio.sleep(60)
            case _:
                send(Goodbye("bye"))

    async def watch(self, requests: AsyncIterator[Any], _: Call, sender: Sender) -> None:
        self.senders.append(sender)
        try:
            rank = (await anext(requests)).group_rank
            if rank == 9:
                raise WrongState("rank: 9 is not of this group")
            sender.send(WATCH_RESPONSES.write(WatchOpened()))
            sender.send(manager_pb2.WatchResponse())  # of a kind that only a newer manager knows
            sender.send(WATCH_RESPONSES.write(Revoked(7, f"of rank {rank}")))
            async for ballot in requests:
                outcome = (
                    Decision(ballot.should_commit, NEXT if ballot.wants_next else None)
                    if ballot.step
                    else Drained("over")
                )
                sender.send(WATCH_RESPONSES.write(VoteAnswer(ballot.number, outcome)))
        finally:
            self.endings.put_nowait(sender.ending)


@asynccontextmanager
async def running() -> AsyncIterator[StreamServer]:
    """One that listens on a free port of this loop's process."""
    server = StreamServer()
    server.port = await server.server.start(f"{LOCALHOST}:0")
    try:
        yield server
    finally:
        await server.server.stop(0)


async def serve() -> None:
    print("port", await StreamServer().server.start("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    uvloop.run(serve())


class RemoteStreamServer(Process):
    """A StreamServer as a process of its own."""

    def __init__(self) -> None:
        super().__init__(f"from {__name__} import main; main()")

    def ready(self) -> None:
        port = self.wait_for_log(r"^port (\d+)")[1]
        self.address = f"{LOCALHOST}:{port}"
