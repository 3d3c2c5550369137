"""Ranks that hang where no Python runs: what their manager finds out of them, with real processes."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from lighthouse_protocol.messages.incident import RankEvidence
from lighthouse_protocol.messages.session import Evidence, EvidenceDone, EvidenceRequest
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
from manager.evidence import NO_OUTPUT, read_process
from tests.lighthouse_runtime.stream_server import StreamServer, running
from tests.processes import LOCALHOST, Manager, Process, eventually

# The interpreter lock is held in the first two: by C code that goes on, and by C code that waits.
RANK = """
import ctypes, re, sys, threading
from agent_client.manager_client.client import ManagerConnection

def stuck_in_a_regular_expression():
    print("stuck now", flush=True)
    re.match("(a+)+$", "a" * 64 + "b")

def stuck_in_a_futex():
    mutex = ctypes.create_string_buffer(64)
    print("stuck now", flush=True)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

def waiting_for_the_others():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(3, 4))
    do_nothing()

def do_nothing():
    print("stuck now", flush=True)
    threading.Event().wait()

manager, rank, how = sys.argv[1:]
link = ManagerConnection(manager, int(rank), "w" + rank, lambda *_: None, returns_within_s=60.0)
link.ensure_watched()
globals()[how]()
"""


@pytest.fixture
async def lighthouse() -> AsyncIterator[StreamServer]:
    """It hears what managers say, and says what a test does."""
    async with running() as lighthouse:
        yield lighthouse


async def heard(lighthouse: StreamServer, number: int) -> list[RankEvidence]:
    """The answer to that request, by ranks."""
    lighthouse.senders[-1].send(SESSION_RESPONSES.write(EvidenceRequest(number)))
    await asyncio.to_thread(eventually, lambda: EvidenceDone(number) in lighthouse.heard, "the end of the answer")
    found = [said.rank for said in lighthouse.heard if isinstance(said, Evidence) and said.number == number]
    return sorted(found, key=lambda rank: rank.group_rank)


def holds_the_lock(evidence: RankEvidence) -> bool:
    return any(why.startswith("Flight Recorder: no answer within") for why in evidence.missing)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_whatever_they_hang_in(lighthouse: StreamServer) -> None:
    ways = ("stuck_in_a_regular_expression", "stuck_in_a_futex", "waiting_for_the_others", "do_nothing", "do_nothing")
    with ExitStack() as running:
        address = f"{LOCALHOST}:{lighthouse.port}"
        manager = await asyncio.to_thread(running.enter_context, Manager(address, ranks=len(ways) + 1))
        ranks = [running.enter_context(Process(RANK, [manager.address, str(n), how])) for n, how in enumerate(ways)]
        for rank in ranks:
            await asyncio.to_thread(rank.wait_for_log, "^stuck now$")

        ranks[3].signal(signal.SIGSTOP)
        ranks[4].kill()
        await asyncio.to_thread(eventually, lambda: read_process(ranks[3].pid).is_stopped)
        for number in range(1, 10):  # a rank says that it is stuck just before it is
            regex, futex, waiting, stopped, ended, never = await heard(lighthouse, number)
            if holds_the_lock(regex) and holds_the_lock(futex):
                break

        for evidence, way in ((regex, ways[0]), (futex, ways[1])):
            assert f"in {way}\n" in evidence.stacks, evidence
            assert evidence.flight_recorder == ""
            assert holds_the_lock(evidence), evidence
        assert "main thread: R (running)" in regex.process
        assert "main thread: S (sleeping)" in futex.process

        assert "in waiting_for_the_others\n" in waiting.stacks
        [entry] = json.loads(waiting.flight_recorder)
        assert (entry["operation"], entry["seq"], entry["input_sizes"]) == ("gloo:all_reduce", 1, [[3, 4]])
        assert waiting.missing == (NO_OUTPUT,)
        assert (waiting.rank_incarnation, waiting.pid) == ("w2", ranks[2].pid)
        assert waiting.host

        assert stopped.process.startswith(f"pid {ranks[3].pid} (python): T (stopped), VmRSS ")
        assert stopped.stacks == ""
        assert "stacks: its process is stopped and cannot run a handler" in stopped.missing
        assert f"process: {ranks[4].pid} has ended" in ended.missing
        assert never.missing == ("all evidence: it has not opened a watch",)

        # Nobody has come to harm by that.
        again = await heard(lighthouse, number + 1)
        assert "T (stopped)" in again[3].process
        assert f"in {ways[0]}\n" in again[0].stacks
        assert [rank.is_alive for rank in ranks] == [True, True, True, True, False]
        ranks[3].signal(signal.SIGCONT)
