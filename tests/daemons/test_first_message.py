"""A stream that is opened and says nothing: each daemon ends it, and says what it has waited for."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from lighthouse.job.records import QuorumConfig
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse.job.store import MemoryStore
from lighthouse.server.metrics import Counters
from lighthouse.server.services import LighthouseService
from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import Hello
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.wire.streams import SESSION_REQUESTS
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.client.streams import SESSION, WATCH
from lighthouse_runtime.security.access import LoopbackAccess
from lighthouse_runtime.server.grpc_server import GrpcServer
from manager.evidence import EvidenceCollector
from manager.group.driver import GroupDriver
from manager.group.link import LighthouseLink
from manager.server.service import ManagerService
from tests.processes import LOCALHOST, PATIENCE_S

SOON_S = 0.05
LONG_S = 600.0


def lighthouse(within_s: float) -> LighthouseService:
    return service_of(
        JobRegistry(QuorumConfig(), Ports(asyncio.get_running_loop(), time.time), MemoryStore()), within_s
    )


def service_of(jobs: JobRegistry, within_s: float) -> LighthouseService:
    return LighthouseService(jobs, Counters(), within_s)


def manager(within_s: float) -> ManagerService:
    link = LighthouseLink(lambda: AsyncLighthouseClient(LOCALHOST), LeaderSearch((Address(LOCALHOST, 1),)))
    loop, evidence = asyncio.get_running_loop(), EvidenceCollector(1, link.send)
    driver = GroupDriver(Participant("a", group_world_size=1), "L", loop, link, evidence, lambda status: None)
    return ManagerService(driver, lambda: pytest.fail("nobody asks for it"), within_s)


@asynccontextmanager
async def opened(service: LighthouseService | ManagerService, path: str) -> AsyncGenerator[Any, None]:
    """A stream on which nothing has been said."""
    server = GrpcServer(service.services(), [], LoopbackAccess())
    port = await server.start(f"{LOCALHOST}:0")
    try:
        async with grpc.aio.insecure_channel(f"{LOCALHOST}:{port}") as channel, asyncio.timeout(PATIENCE_S):
            yield channel.stream_stream(path)()
    finally:
        await server.stop(0)


NONE_CAME = f"hello: none came within {SOON_S:g} s"


@pytest.mark.parametrize(
    ("service", "path", "first", "details"),
    [
        (lighthouse, SESSION.path, None, NONE_CAME),
        (manager, WATCH.path, None, NONE_CAME),
        (lighthouse, SESSION.path, {}, NONE_CAME),  # of a newer manager
        (lighthouse, SESSION.path, {"leave": {}}, "hello: must be the first message of this stream"),
    ],
)
async def test_it_is_ended_with_what_is_missing(service: Any, path: str, first: Any, details: str):
    async with opened(service(SOON_S), path) as stream:
        if first is not None:
            await stream.write(lighthouse_pb2.SessionRequest(**first).SerializeToString())
        assert await stream.details() == details
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_job_that_is_forgotten_before_its_first_hello_knows_who_says_it():
    """Whoever asks for a status has quiet jobs forgotten."""
    jobs = JobRegistry(QuorumConfig(), Ports(asyncio.get_running_loop(), time.time), MemoryStore())
    service = service_of(jobs, LONG_S)
    async with opened(service, SESSION.path) as stream:
        await asyncio.sleep(4 * SOON_S)  # it is open, and has said nothing
        assert service.status().jobs == ()
        await stream.write(
            SESSION_REQUESTS.write(
                Hello(Participant("a", "1"), secret="known to this manager alone, of this test")
            ).SerializeToString()
        )
        assert lighthouse_pb2.SessionResponse.FromString(await stream.read()).HasField("welcome")
        assert [member.replica_id for job in service.status().jobs for member in job.members] == ["a"]


async def test_once_it_has_spoken_it_may_be_silent():
    async with opened(manager(SOON_S), WATCH.path) as stream:
        await stream.write(manager_pb2.WatchRequest(hello={"rank_incarnation": "w"}).SerializeToString())
        assert manager_pb2.WatchResponse.FromString(await stream.read()).HasField("opened")
        await asyncio.sleep(3 * SOON_S)
        assert not stream.done()
