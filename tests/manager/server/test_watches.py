"""A rank's watch at a manager's port."""

import asyncio

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import WatchHello, WatchOpened
from lighthouse_runtime.client.clients import AsyncManagerClient
from lighthouse_runtime.client.streams import WATCH
from lighthouse_runtime.process.children import host_id
from lighthouse_runtime.server.grpc_server import GrpcServer
from lighthouse_runtime.timing.pacing import SuspensionTimers
from manager.group.driver import GroupDriver
from manager.server.service import REFLECTED, GroupAccess, ManagerService
from tests.manager.recorders import Link, NoEvidence
from tests.processes import LOCALHOST, PATIENCE_S


async def test_a_hello_with_the_pid_of_no_process_leaves_no_rank_behind():
    timers = SuspensionTimers(asyncio.get_running_loop())
    group = GroupDriver(Participant("a"), "L", timers, Link(), NoEvidence(), lambda _: None)
    server = GrpcServer(ManagerService(group, lambda: NotImplemented).services(), REFLECTED, GroupAccess(""))
    port = await server.start(f"{LOCALHOST}:0")
    try:
        async with asyncio.timeout(PATIENCE_S), AsyncManagerClient(f"{LOCALHOST}:{port}") as client:
            async with client.open(WATCH) as watch:
                watch.send(WatchHello(0, "w0", pid=2**40, host=host_id()))
                assert await anext(watch) == WatchOpened()
                watch.end()
                assert [message async for message in watch] == []
    finally:
        await server.stop(0)
    assert not group.has_ranks
    group.close("the test is over")
