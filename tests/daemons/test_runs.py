"""Runs of a real lighthouse: ranks and supervisors hold streams, it is killed and comes back, and people stop a run."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.run import (
    FailureReport,
    FinishReport,
    GenerationEnded,
    GenerationFormed,
    KeyKind,
    ProcessLost,
    RankHeartbeat,
    RankHello,
    RankId,
    RankWelcome,
    ReadyReport,
    RunCompleted,
    RunCounters,
    RunStatus,
    RunStopped,
    RunTerms,
    StopAsked,
    SupervisorHello,
    SupervisorWelcome,
)
from lighthouse_protocol.refusals import Unreachable, WrongState
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.client.streams import AsyncRankStream, SupervisorStream
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse

TERMS = RunTerms(world_size=2, stride=100)
SECRET = "known to the supervisor of all ranks, and to them"
FIRST = GenerationFormed(RunCounters(0), (0, 1))


def rank_id(slot: int) -> RankId:
    return RankId(slot, f"i{slot}")


@asynccontextmanager
async def client(lighthouse: Lighthouse, run: str) -> AsyncGenerator[AsyncLighthouseClient]:
    async with AsyncLighthouseClient(lighthouse.address, run=run) as opened, asyncio.timeout(PATIENCE_S):
        yield opened


async def entered(at: AsyncLighthouseClient, slot: int, **held: object) -> AsyncRankStream:
    """A rank's stream, ready."""
    stream = at.rank(wait_for_ready=True)
    stream.send(RankHello(rank_id(slot), TERMS, is_ready=True, secret=SECRET, **held))  # pyright: ignore[reportArgumentType]
    return stream


async def said(stream: AsyncRankStream | SupervisorStream) -> object:
    """The next message that is more than a welcome to a rank."""
    while isinstance(message := await anext(stream), RankWelcome):
        pass
    return message


async def supervised(at: AsyncLighthouseClient, name: str = "g", incarnation: str = "s1") -> SupervisorStream:
    stream = at.supervise(wait_for_ready=True)
    stream.send(SupervisorHello(name, incarnation, "h1", (0, 1), SECRET))
    return stream


async def two_ranks(at: AsyncLighthouseClient) -> tuple[AsyncRankStream, AsyncRankStream]:
    a, b = [await entered(at, slot) for slot in (0, 1)]
    assert [await said(a), await said(b)] == [FIRST, FIRST]
    return a, b


async def status(at: AsyncLighthouseClient, run: str) -> RunStatus:
    (found,) = await at.runs(run)
    return found


async def seen(at: AsyncLighthouseClient, run: str, is_so: Callable[[RunStatus], bool]) -> RunStatus:
    """Its status, once that is so."""
    while not is_so(found := await status(at, run)):  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.01)
    return found


async def test_a_loss_is_told_in_milliseconds(lighthouse: Lighthouse):
    async with client(lighthouse, "loss") as at, await supervised(at) as supervisor:
        assert await said(supervisor) == SupervisorWelcome(1.0)
        a, b = await two_ranks(at)
        began_at = time.monotonic()
        b.cancel()
        over = await said(a)
        assert time.monotonic() - began_at < 20.0  # and not the 30 s of a rank that is silent
        assert isinstance(over, GenerationEnded)
        supervisor.send(ProcessLost(rank_id(1), "SIGSEGV", ("last words",)))
        a.send(ReadyReport(0))
        assert await said(a) == GenerationFormed(RunCounters(1, 0, 1, 1), (0,))
        a.send(RankHeartbeat(7, "forward"))
        shown = await seen(at, "loss", lambda run: run.ranks[0].step == 7)
        (summary,) = [
            each for each in await at.incidents() if each.text == "run loss, generation 0: slot 1 (i1): SIGSEGV"
        ]
        assert (summary.kind, summary.suspects, summary.quorum_id) == (IncidentKind.RESTART, ("loss/1",), 1)
        assert [evidence.rank.output for evidence in (await at.incident(summary.id)).evidence] == [("last words",)]
        assert [(rank.state, rank.step, rank.phase) for rank in shown.ranks] == [
            ("active", 7, "forward"),
            ("lost", 0, ""),
        ]
        assert [(s.name, s.host, s.slots, s.is_connected) for s in shown.supervisors] == [("g", "h1", (0, 1), True)]


async def test_keys_are_fenced(lighthouse: Lighthouse):
    async with client(lighthouse, "keys") as at:
        a, _ = await two_ranks(at)
        await at.put_key(0, KeyKind.ITERATION, "rank_0", b"5", slot=0, secret=SECRET)
        await at.put_key(0, KeyKind.JOB_RESTART, "count", b"1", slot=1, secret=SECRET)
        both = {(KeyKind.ITERATION, "rank_0"): b"5", (KeyKind.JOB_RESTART, "count"): b"1"}
        assert await at.get_keys(0) == (0, both)
        assert await at.get_keys(kind=KeyKind.JOB_RESTART) == (0, {(KeyKind.JOB_RESTART, "count"): b"1"})
        assert await at.get_keys(name="rank_0") == (0, {(KeyKind.ITERATION, "rank_0"): b"5"})
        a.send(FailureReport(0, "x"))
        for rank in (a, _):
            rank.send(ReadyReport(0))
        while isinstance(await said(a), GenerationEnded):
            pass
        with pytest.raises(WrongState, match="generation: 0 is not the current one"):
            await at.put_key(0, KeyKind.ITERATION, "rank_0", b"6", slot=0, secret=SECRET)
        with pytest.raises(WrongState, match="generation: 0 is not the current one"):
            await at.get_keys(0)
        assert await at.get_keys() == (1, {})


# -- kill -9 of the lighthouse


@asynccontextmanager
async def lighthouse_at(port: int, journal: Path) -> AsyncGenerator[Lighthouse]:
    with Lighthouse("--bind", f"{LOCALHOST}:{port}", "--journal", str(journal)) as process:
        yield process


async def broken(stream: AsyncRankStream | SupervisorStream) -> None:
    with pytest.raises(Unreachable):
        while True:
            await said(stream)


async def test_a_stop_outlives_the_lighthouse_and_holds_for_its_run(tmp_path: Path):
    port, journal = free_port(), tmp_path / "journal"
    async with lighthouse_at(port, journal) as first, client(first, "r") as at:
        supervisor = await supervised(at)
        assert await said(supervisor) == SupervisorWelcome(1.0)
        a, b = await two_ranks(at)
        stop = RunStopped("exit code 130 of slot 1", "g", 0)
        supervisor.send(StopAsked(stop.reason))
        assert [await said(a), await said(b), await said(supervisor)] == [stop] * 3
        first.kill()
    async with lighthouse_at(port, journal) as second, client(second, "r") as at, client(second, "next") as other:
        for attempt in range(2):
            rank = await entered(at, attempt)
            assert await said(rank) == stop
        assert await said(await supervised(at, "new", "s7")) == stop
        assert (await status(at, "r")).stop == stop
        await two_ranks(other)
        await at.resume_run()
        again = at.rank()
        again.send(RankHello(rank_id(0), TERMS, is_ready=True, secret=SECRET))
        assert (await status(at, "r")).stop is None


@pytest.mark.slow
async def test_a_run_goes_on_after_a_kill_of_the_lighthouse(tmp_path: Path):
    """Numbers go upwards, keys are there, nobody is interrupted, and a completion stays."""
    port, journal = free_port(), tmp_path / "journal"
    async with lighthouse_at(port, journal) as first, client(first, "r") as at:
        a, b = await two_ranks(at)
        await at.put_key(0, KeyKind.ITERATION, "rank_0", b"5", slot=0, secret=SECRET)
        first.kill()
        await broken(a)
        await broken(b)
    async with lighthouse_at(port, journal) as second, client(second, "r") as at:
        a, b = at.rank(wait_for_ready=True), at.rank(wait_for_ready=True)
        for slot, rank in enumerate((a, b)):
            rank.send(RankHello(rank_id(slot), TERMS, generation=0, seen=0, secret=SECRET))
        await seen(at, "r", lambda run: {rank.state for rank in run.ranks} == {"active"})
        assert await at.get_keys(0) == (0, {(KeyKind.ITERATION, "rank_0"): b"5"})
        b.send(FailureReport(0, "x"))
        assert isinstance(await said(a), GenerationEnded)
        assert isinstance(await said(b), GenerationEnded)
        for rank in (a, b):
            rank.send(ReadyReport(0))
            rank.send(FinishReport(1))
        assert await said(a) == GenerationFormed(RunCounters(1, 0, 1, 1), (0, 1))
        assert await said(a) == RunCompleted(1)
        second.kill()
    async with lighthouse_at(port, journal) as third, client(third, "r") as at:
        late = at.rank()
        late.send(RankHello(RankId(1, "restarted"), TERMS, attempt=1, secret=SECRET))
        assert await said(late) == RunCompleted(1)
        anew = [at.rank(), at.rank()]
        late.cancel()
        for slot, rank in enumerate(anew):
            rank.send(RankHello(RankId(slot, f"new{slot}"), TERMS, is_ready=True, secret=SECRET))
        assert [await said(rank) for rank in anew] == [GenerationFormed(RunCounters(100, 100), (0, 1))] * 2
