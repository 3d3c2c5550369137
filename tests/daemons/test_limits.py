"""What one caller may hold of a lighthouse and send to it, with small numbers: refused with the reason, and the others
are served."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from lighthouse.job.records import QuorumConfig
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse.server.metrics import Counters
from lighthouse.server.services import LighthouseService, RunService
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.run import (
    GenerationFormed,
    KeyKind,
    RankHello,
    RankId,
    ReadyReport,
    RunTerms,
    SupervisorHello,
)
from lighthouse_protocol.messages.session import GroupReport, Heartbeat, HeartbeatAck, Hello, Welcome
from lighthouse_protocol.rank_set import RankSet
from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.rate_limits import PeerLimits, Rate
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.client.streams import SESSION, SUPERVISE
from lighthouse_runtime.security.access import LocalOperatorAccess
from lighthouse_runtime.server.grpc_server import GrpcServer, Peers
from tests.processes import LOCALHOST, PATIENCE_S

NEVER = 1e-9  # a second
SECRET = "0123456789abcdef" * 2


@dataclass(frozen=True, slots=True)
class Served:
    port: int
    service: LighthouseService

    @property
    def address(self) -> str:
        return f"{LOCALHOST}:{self.port}"

    def client(self, job: str = "default", run: str = "default") -> AsyncLighthouseClient:
        return AsyncLighthouseClient(self.address, job=job, run=run)


@asynccontextmanager
async def served(**limits: Any) -> AsyncGenerator[Served]:
    loop, peers = asyncio.get_running_loop(), Peers(PeerLimits(**limits))
    jobs = JobRegistry(QuorumConfig(), Ports(loop, time.time))
    runs = jobs.runs
    service = LighthouseService(jobs, Counters(), peers=peers)
    more = RunService(runs, peers=peers).methods()
    server = GrpcServer(service.services(more), [], LocalOperatorAccess(), peers=peers)
    port = await server.start(f"{LOCALHOST}:0")
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Served(port, service)
    finally:
        jobs.close("the test is over")
        await server.stop(0)


def hello(name: str, world_size: int = 1, **levels: Any) -> Hello:
    return Hello(Participant(name, "i1", group_world_size=world_size), GroupReport(**levels), secret=SECRET)


async def refusal(session: Any) -> str:
    """What ends it."""
    with pytest.raises(LimitReached) as refused:
        async for _ in session:
            pass
    return str(refused.value)


async def let_in(client: AsyncLighthouseClient) -> None:
    """The server hears of the ends of others a little later."""
    while True:
        try:
            await client.heartbeat("c")
            return
        except LimitReached:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"stream_messages": Rate(NEVER, 5)}, "messages on one stream by 127.0.0.1: at most 5 at once and 1e-09 a sec"),
        ({"stream_bytes": Rate(NEVER, 200)}, "bytes on one stream by 127.0.0.1: at most 200 at once"),
        ({"messages": Rate(NEVER, 5)}, "messages on streams by 127.0.0.1: at most 5 at once"),
        ({"bytes": Rate(NEVER, 200)}, "bytes sent by 127.0.0.1: at most 200 at once"),
    ],
)
async def test_a_stream_that_says_too_much_is_ended(
    limits: dict[str, Rate], what: str, caplog: pytest.LogCaptureFixture
):
    async with served(**limits) as lighthouse, lighthouse.client() as client, client.session() as session:
        session.send(hello("a"))
        with pytest.raises(LimitReached) as refused:
            for number in range(100):
                await anext(session)
                session.send(Heartbeat(number, GroupReport(down="x" * 20)))
    said = str(refused.value)
    assert said.startswith(what)
    assert said.endswith("send less, or later")
    assert f"refused: {said}" in caplog.text


async def test_so_many_calls_and_streams_are_open_and_a_closed_one_makes_room():
    async with served(open=2) as lighthouse, lighthouse.client() as client:
        async with client.session() as first, client.session() as second:
            for session, name in ((first, "a"), (second, "b")):
                session.send(hello(name))
                assert isinstance(await anext(session), Welcome)
            with pytest.raises(LimitReached, match="^127.0.0.1 has 2 calls and streams open; at most 2 for each peer"):
                await client.heartbeat("c")
            async with client.session() as third:
                assert "--max-open-per-peer" in await refusal(third)
        await let_in(client)


async def test_new_names_are_counted_and_known_ones_come_back_as_they_like():
    async with served(replica_ids=Rate(NEVER, 2), jobs=Rate(NEVER, 2)) as lighthouse, lighthouse.client() as client:
        for name in ("a", "b", "a", "b"):
            async with client.session() as session:
                session.send(hello(name))
                assert isinstance(await anext(session), Welcome)
        async with client.session() as session:
            session.send(hello("c"))
            assert (await refusal(session)).startswith("new replica ids by 127.0.0.1: at most 2 at once")
        assert {member.replica_id for job in lighthouse.service.status().jobs for member in job.members} == {"a", "b"}
        async with lighthouse.client(job="one_more") as more, more.session() as session:
            session.send(hello("a"))
            assert "new replica ids" in await refusal(session)
        async with lighthouse.client(job="too_many") as more, more.session() as session:
            session.send(hello("a"))
            assert (await refusal(session)).startswith("new jobs by 127.0.0.1: at most 2 at once")
        assert [job.job for job in lighthouse.service.status().jobs] == ["default"]


async def test_a_heartbeat_that_shows_too_many_ranks_is_taken_without_them():
    def shown(count: int) -> GroupView:
        return GroupView("a", "i1", tuple(RankView(RankName("a", n), ProgressSample(), 60.0) for n in range(count)))

    async with (
        served(ranks_shown=Rate(NEVER, 3)) as lighthouse,
        lighthouse.client() as client,
        client.session() as session,
    ):
        session.send(hello("a", 3))
        assert isinstance(await anext(session), Welcome)
        for number, count in ((1, 2), (2, 3)):
            session.send(Heartbeat(number, progress=shown(count)))
            while not isinstance(await anext(session), HeartbeatAck):
                pass
        [job] = (await client.status(ranks=True)).jobs
        assert len(job.ranks) == 2


async def test_sets_of_ranks_of_the_largest_size_are_counted_and_put_in_words_without_a_list_of_them():
    """300 sessions with such sets took 1.3 GB, and 150 ms for each heartbeat of others."""
    everyone = RankSet.first(MAX_GROUP_WORLD_SIZE)
    odd = RankSet.from_bytes(b"\xaa" * (MAX_GROUP_WORLD_SIZE // 8))
    async with served() as lighthouse, lighthouse.client() as client:
        sessions = [client.session() for _ in range(20)]
        for number, session in enumerate(sessions):
            session.send(hello(f"g{number:02}", MAX_GROUP_WORLD_SIZE, missing=odd if number % 2 else everyone - odd))
            assert isinstance(await anext(session), Welcome)
        [job] = (await client.status()).jobs
        assert len(job.members) == 20
        assert "g00 has ranks 1, 3, 5, " in job.explanation
        assert f"and {MAX_GROUP_WORLD_SIZE // 2 - 16} more of 65536" in job.explanation
        assert job.explanation.endswith("and 12 groups more")
        for session in sessions:
            session.cancel()


@pytest.mark.parametrize(
    ("limits", "what"),
    [({"runs": Rate(NEVER, 1)}, "new runs by 127.0.0.1"), ({"processes": Rate(NEVER, 2)}, "new processes of runs by")],
)
async def test_runs_and_their_processes_are_counted(limits: dict[str, Rate], what: str):
    async with served(**limits) as lighthouse:
        for run in ("one", "one"):
            async with lighthouse.client(run=run) as client, client.supervise() as stream:
                stream.send(SupervisorHello("a", "i1", secret=SECRET))
                await anext(stream)
        async with lighthouse.client(run="two") as client, client.supervise() as stream:
            stream.send(SupervisorHello("a", "i1", secret=SECRET))
            assert (await refusal(stream)).startswith(what)


async def test_keys_written_are_counted_for_the_peer_not_only_for_the_run():
    async with served(durable_writes=Rate(NEVER, 2)) as lighthouse, lighthouse.client() as client:
        async with client.rank() as rank:
            rank.send(RankHello(RankId(0, "r"), RunTerms(1), secret=SECRET))
            rank.send(ReadyReport())
            while not isinstance(formed := await anext(rank), GenerationFormed):
                pass
            number = formed.counters.number
            for name in "ab":
                await client.put_key(number, KeyKind.ITERATION, name, b"1", slot=0, secret=SECRET)
            with pytest.raises(LimitReached, match="^keys written by 127.0.0.1: at most 2 at once"):
                await client.put_key(number, KeyKind.ITERATION, "c", b"1", slot=0, secret=SECRET)
            assert [key for _, key in (await client.get_keys())[1]] == ["a", "b"]


async def test_a_flood_of_mute_streams_keeps_nobody_out_and_leaves_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    async with served(open=50) as lighthouse:
        async with grpc.aio.insecure_channel(lighthouse.address) as channel:
            mute = [channel.stream_stream(path)() for path in (SESSION.path, SUPERVISE.path) for _ in range(40)]
            codes = await asyncio.gather(*(_code_soon(call) for call in mute))
            assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 30
        async with lighthouse.client() as client:
            await let_in(client)
    assert len([record for record in caplog.records if "refused" in record.message]) == 1


async def _code_soon(call: Any) -> grpc.StatusCode | None:
    """None: it is still open."""
    try:
        async with asyncio.timeout(2.0):
            return await call.code()
    except TimeoutError:
        return None


async def test_a_reused_status_has_the_time_of_its_answer(monkeypatch: pytest.MonkeyPatch):
    async with served() as lighthouse:
        client = lighthouse.client()
        monkeypatch.setattr("lighthouse_runtime.timing.pacing.CHEAP_S", -1.0)  # so that each answer is reused
        monkeypatch.setattr("lighthouse_runtime.timing.pacing.LOOP_SHARE", 1e-9)
        first = await client.status()
        asked_at = time.time()
        second = await client.status()
        await client.close()
    assert second.uptime_s == first.uptime_s, "a reused answer"
    assert second.now_unix_s >= asked_at
