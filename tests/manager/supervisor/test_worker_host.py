"""A further host of a group, below a host 0 that is a script. The guard is real, and no lighthouse is asked."""

import asyncio

from lighthouse_protocol.messages.hosts import (
    FromHost,
    HostHeartbeat,
    HostHello,
    HostRankEnded,
    HostWelcome,
    StartRanks,
)
from lighthouse_protocol.messages.run import SupervisorWelcome
from lighthouse_protocol.wire.streams import NODE_REQUESTS, NODE_RESPONSES
from lighthouse_runtime.security.access import LoopbackAccess
from lighthouse_runtime.server.grpc_server import Call, GrpcServer, Stream
from lighthouse_runtime.server.streams import Requests, Sender
from manager.guard.client import GuardClient
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.local_host import Launch
from manager.supervisor.worker_host import WorkerHost
from tests.processes import PATIENCE_S


class Head:
    """Starts rank 1 on each stream, from another address each time, and closes the stream when the rank has ended."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[HostRankEnded] = asyncio.Queue()
        self._streams = 0

    async def serve(self, requests: Requests[FromHost], _: Call, sender: Sender) -> None:
        async for message in requests:
            match message:
                case HostHello():
                    self._streams += 1
                    orders = (
                        HostWelcome(f"10.0.0.{self._streams}", 29500 + self._streams),
                        StartRanks((1,), self._streams, "u"),
                    )
                    for order in orders:
                        sender.send(NODE_RESPONSES.write(order))
                case HostRankEnded():
                    self.ends.put_nowait(message)
                    return
                case HostHeartbeat():
                    pass
                case _:
                    raise AssertionError(message)


async def test_the_ranks_connect_to_the_host_0_that_has_started_them() -> None:
    """A pod of host 0 that is created again has the same name, and another address."""
    script = "test $MASTER_ADDR:$MASTER_PORT = 10.0.0.$LIGHTHOUSE_ATTEMPT:$((29500 + LIGHTHOUSE_ATTEMPT))"
    head = Head()
    server = GrpcServer(
        {"manager.v1.ManagerService": {"Node": Stream(NODE_REQUESTS, head.serve)}}, [], LoopbackAccess()
    )
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    guard = GuardClient()
    guarding = asyncio.create_task(guard.run())
    settings = SupervisorConfig(nnodes=2, node_rank=1, head=address)
    worker = WorkerHost(Launch(ManagerConfig("127.0.0.1:1", "a"), settings, ("sh", "-c", script), None), guard)
    try:
        worker.receive(SupervisorWelcome(60.0))
        async with asyncio.timeout(PATIENCE_S):
            for attempt in (1, 2, 3):
                assert await head.ends.get() == HostRankEnded(1, attempt, 0)
    finally:
        await worker._close()  # pyright: ignore[reportPrivateUsage]
        await guard.stop()
        await guarding
        await server.stop(0)
