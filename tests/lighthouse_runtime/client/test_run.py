"""A run's client over real connections: its streams, its keys, what it is, its stop; each names the run."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from lighthouse_protocol.messages.run import (
    KeyKind,
    RankHeartbeat,
    RankHello,
    RankId,
    RunCompleted,
    RunStopped,
    RunTerms,
)
from lighthouse_protocol.messages.supervisor import StopAsked, SupervisorHello, SupervisorWelcome
from lighthouse_protocol.refusals import Superseded, WrongState
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient, LighthouseClient
from tests.lighthouse_runtime.run_server import RUN, RunServer
from tests.processes import LOCALHOST

ENTRY = RankHello(RankId(0, "a"), RunTerms(world_size=2))
SUPERVISOR = SupervisorHello("g", "1", "h", (0, 1))


@pytest.fixture
async def server() -> AsyncIterator[tuple[RunServer, str]]:
    running = RunServer()
    port = await running.server.start(f"{LOCALHOST}:0")
    yield running, f"{LOCALHOST}:{port}"
    await running.server.stop(0)


async def test_a_rank_of_a_training_process_says_and_hears(server: tuple[RunServer, str]):
    running, address = server

    def live() -> list[object]:
        with LighthouseClient(address, run="r") as client, client.rank() as stream:
            stream.send(ENTRY)
            heard: list[object] = [next(stream)]
            stream.send(RankHeartbeat(1))
            heard.append(next(stream))
            with pytest.raises(Superseded, match=r"^the end$"):
                next(stream)
            return heard

    assert await asyncio.to_thread(live) == [RunStopped("None/r", "", 0), RunCompleted(0)]
    assert running.heard == [ENTRY, RankHeartbeat(1)]


async def test_a_stream_given_up_by_another_thread_ends(server: tuple[RunServer, str]):
    def live() -> list[object]:
        with LighthouseClient(server[1]) as client, client.rank() as stream:
            stream.send(ENTRY)
            heard: list[object] = [next(stream)]
            stream.cancel()
            return heard + list(stream)

    assert await asyncio.to_thread(live) == [RunStopped("None/None", "", 0)]


async def test_a_supervisor_says_and_hears(server: tuple[RunServer, str]):
    running, address = server
    async with AsyncLighthouseClient(address, run="r") as client, client.supervise() as stream:
        stream.send(SUPERVISOR)
        assert [await anext(stream), await anext(stream)] == [SupervisorWelcome(2.5), RunStopped("None/r", "", 0)]
        stream.send(StopAsked("130"))
        assert [message async for message in stream] == []
    assert running.heard == [SUPERVISOR, StopAsked("130")]


async def test_what_is_asked_and_told(server: tuple[RunServer, str]):
    running, address = server
    async with AsyncLighthouseClient(address, job="j", run="r") as client:
        await client.put_key(3, KeyKind.JOB_RESTART, "a", b"1")
        with pytest.raises(WrongState, match=r"^generation: fenced$"):
            await client.put_key(2, KeyKind.JOB_RESTART, "a", b"1")
        assert await client.get_keys() == (3, {(KeyKind.ITERATION, "a"): b"1"})
        assert (await client.runs(), await client.runs("other")) == ((RUN,), ())
        await client.stop_run("enough")
        await client.resume_run()
    assert running.heard == [
        ("job_restart", "a", b"1"),
        (False, "", ""),
        ("stop", "j/r", "enough"),
        ("resume", "j/r"),
    ]
