"""One replica group on two hosts, in two network namespaces: a supervisor each, one manager."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import pytest

from examples.ports import free_port
from lighthouse_protocol.messages.hosts import HostHello, HostWelcome, StartRanks, ToHost
from lighthouse_protocol.refusals import LighthouseError, Unreachable
from lighthouse_runtime.client.clients import AsyncManagerClient
from manager.guard.process_tree import environment
from tests.daemons.elsewhere import Elsewhere
from tests.daemons.supervisors import QUICK, SLEEP, Supervisor, restarted, runs
from tests.processes import LIGHTHOUSE_CODE, PATIENCE_S, Lighthouse, eventually, run_cli

pytestmark = pytest.mark.slow

OPTIONS = (*QUICK, "--termination-grace", "2s", "--nnodes", "2", "--nproc-per-node", "2")
SECRET = {"LIGHTHOUSE_MANAGER_SECRET": "the_same_on_all_hosts_of_the_group"}


@pytest.fixture(scope="module")
def lighthouse(elsewhere: Elsewhere) -> Iterator[Lighthouse]:
    with Lighthouse("--bind", f"{elsewhere.here}:0", "--insecure") as process:
        process.host = elsewhere.here
        yield process


class Group(NamedTuple):
    first: Supervisor
    second: Supervisor
    elsewhere: Elsewhere
    options: tuple[str, ...]

    def run(self) -> set[int]:
        return {*runs(self.first, 2), *runs(self.second, 2)}

    def restarts_whole_and_stops(self, before: set[int]) -> None:
        for supervisor in (self.first, self.second):
            restarted(supervisor, 1)
        assert not before & self.run()
        assert self.second.stop() == 143
        assert self.first.wait() == 143


def further(
    lighthouse: Lighthouse,
    elsewhere: Elsewhere,
    options: tuple[str, ...],
    command: str | Sequence[str] = SLEEP,
    env: Mapping[str, str] = SECRET,
) -> Supervisor:
    return Supervisor(
        lighthouse.address, *options, "--node-rank", "1", command=command, prefix=elsewhere.command, env=env
    )


@contextlib.contextmanager
def group(
    lighthouse: Lighthouse, elsewhere: Elsewhere, run: str, command: str | Sequence[str] = SLEEP, *more: str
) -> Generator[Group]:
    address = f"{elsewhere.here}:{free_port(elsewhere.here)}"
    options = (*OPTIONS, *more, "--run-id", run, "--head", address)
    at = ("--bind", address, "--advertise", elsewhere.here)
    first = Supervisor(lighthouse.address, *options, *at, command=command, env=SECRET)
    second = further(lighthouse, elsewhere, options, command)
    with contextlib.ExitStack() as stack:
        for supervisor in (first, second):
            stack.callback(supervisor.close)
            supervisor.launch()
        for supervisor in (first, second):
            restarted(supervisor, 0)
        yield Group(first, second, elsewhere, options)


def test_the_ranks_are_told_where_they_are(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    counts = "$RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $LOCAL_RANK"
    command = f"echo {counts} $MASTER_ADDR:$MASTER_PORT $LIGHTHOUSE_MANAGER_ADDRESS"
    with group(lighthouse, elsewhere, "told", command) as (first, second, _, options):
        assert (first.wait(), second.wait()) == (0, 0)
        manager = options[-1]
        for supervisor, host, ranks in ((first, 0, (0, 1)), (second, 1, (2, 3))):
            for local, rank in enumerate(ranks):
                told = f"[a/{rank}] {rank}/4 {host}/2 {local} {elsewhere.here}:29500 {manager}\n"
                assert told in supervisor.log()


@pytest.mark.parametrize("host", [0, 1])
def test_a_rank_killed_on_either_host_restarts_both_halves(
    lighthouse: Lighthouse, elsewhere: Elsewhere, host: int
) -> None:
    with group(lighthouse, elsewhere, f"either-{host}") as both:
        before = both.run()
        os.kill((both.first, both.second)[host].below[0], signal.SIGKILL)
        both.restarts_whole_and_stops(before)
        assert both.first.gone()
        assert both.second.gone()


def test_a_supervisor_killed_elsewhere_leaves_nothing_behind_and_is_waited_for(
    lighthouse: Lighthouse, elsewhere: Elsewhere
) -> None:
    with group(lighthouse, elsewhere, "elsewhere") as both:
        both.run()
        both.second.kill()
        eventually(both.second.gone, "its host is clean")
        eventually(lambda: not both.first.below, "the other half has ended, too")
        assert both.first.is_alive
        with further(lighthouse, elsewhere, both.options) as again:
            restarted(again, 1)
            restarted(both.first, 1)
            assert len(runs(again, 2) + runs(both.first, 2)) == 4
            assert both.first.stop() == 143
            assert again.wait() == 143


# Of the rank that holds the interpreter lock on the other host, nobody hears a word.
WATCHED = """
import ctypes, os, threading
from agent_client.manager_client.client import ManagerConnection
from lighthouse_runtime.client.clients import manager_at

def waits():
    print(f"rank {rank} is there", flush=True)
    threading.Event().wait()

def stuck_in_a_futex():
    mutex = ctypes.create_string_buffer(64)
    print(f"rank {rank} is there", flush=True)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

rank = int(os.environ["RANK"])
address = os.environ["LIGHTHOUSE_MANAGER_ADDRESS"]
place = manager_at(address, os.environ["LIGHTHOUSE_MANAGER_SECRET"]).join_string()
manager = ManagerConnection(place, rank, f"w{rank}", lambda *_: None, returns_within_s=60)
manager.ensure_watched()
stuck_in_a_futex() if rank == 2 else waits()
"""


def test_what_a_rank_on_the_other_host_does_is_seen_from_outside(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    with group(lighthouse, elsewhere, "seen", [sys.executable, "-c", WATCHED]) as both:
        for rank, supervisor in enumerate((both.first, both.first, both.second, both.second)):
            supervisor.wait_for_log(f"rank {rank} is there")
        stopped = {int(pid) for pid in both.second.below if b"RANK=3" in environment(pid)}
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        port = lighthouse.address.rpartition(":")[2]
        operator = run_cli(LIGHTHOUSE_CODE, "token", "operate", "--port", port, "--host", elsewhere.here).stdout.strip()
        told = run_cli(LIGHTHOUSE_CODE, "stacks", "--lighthouse", operator, "--rank", "a", "--format", "json")
        assert told.returncode == 0, told.stderr
        first, _, stuck, paused = json.loads(told.stdout)["evidence"]
        assert "in waits\n" in first["stacks"]
        assert "in stuck_in_a_futex\n" in stuck["stacks"]
        assert f"pid {stopped.pop()} (python): T (stopped)" in paused["process"]
        assert [rank["output"] for rank in (first, stuck, paused)] == [[f"rank {n} is there"] for n in (0, 2, 3)]


class TestSilence:
    """Nobody has ended, and nothing is heard for 10 s."""

    @pytest.mark.parametrize("what", ["cable", "first", "second"])
    def test_a_cable_that_is_pulled_or_a_supervisor_that_is_paused(
        self, lighthouse: Lighthouse, elsewhere: Elsewhere, what: str
    ) -> None:
        """A group is whole or not at all: each half that is cut off ends by itself, and both start again after it. One
        that was paused finds its ranks taken for lost, and they are."""
        with group(lighthouse, elsewhere, f"silence-{what}") as both:
            before = both.run()
            with elsewhere.unplugged() if what == "cable" else getattr(both, what).paused():
                if what != "first":
                    both.first.wait_for_log("lost host 1")
                    eventually(lambda: not both.first.below, "its half has ended")
                if what != "second":
                    both.second.wait_for_log("host 0 is unreachable: .*silent for 10 s")
                    eventually(lambda: not both.second.below, "the other half has ended")
            both.restarts_whole_and_stops(before)

    def test_a_supervisor_that_hangs(self, lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
        """Its connection lives and it says nothing. It is not refused: it may enter again."""
        address = f"{elsewhere.here}:{free_port(elsewhere.here)}"
        options = (*OPTIONS, "--run-id", "hangs", "--bind", address, "--advertise", elsewhere.here)
        supervisor = Supervisor(lighthouse.address, *options, command=SLEEP, env=SECRET)
        supervisor.launch()
        with contextlib.closing(supervisor):
            heard, refused = asyncio.run(as_second_host(address, "hangs"))
            assert isinstance(heard[0], HostWelcome)
            assert (orders := [each for each in heard if isinstance(each, StartRanks)])[0].ranks == (2, 3)
            assert isinstance(refused, Unreachable)
            assert "host 1 was silent for 10 s" in str(refused)
            eventually(lambda: not supervisor.below, "its half has ended")
            heard, _ = asyncio.run(as_second_host(address, "hangs"))
            again = [each for each in heard if isinstance(each, StartRanks)]
            assert [(each.ranks, each.attempt) for each in (*orders, *again)] == [((2, 3), 0), ((2, 3), 1)]
            assert orders[0].unit != again[0].unit
            restarted(supervisor, 1)
            assert supervisor.stop() == 143


async def as_second_host(address: str, run: str) -> tuple[list[ToHost], LighthouseError | None]:
    """What is said to a host 1 that only enters, and how that ends."""
    heard: list[ToHost] = []
    secret = SECRET["LIGHTHOUSE_MANAGER_SECRET"]
    async with asyncio.timeout(PATIENCE_S), AsyncManagerClient(address, secret) as client:
        await client.connect(PATIENCE_S)
        async with client.host() as stream:
            stream.send(HostHello("a", run, 1, 2, 2, "i"))
            try:
                async for message in stream:
                    heard.append(message)
            except LighthouseError as e:
                return heard, e
    return heard, None


def test_the_first_supervisor_killed_leaves_nothing_behind_on_the_other(
    lighthouse: Lighthouse, elsewhere: Elsewhere
) -> None:
    with group(lighthouse, elsewhere, "first") as both:
        runs(both.second, 2)
        both.first.kill()
        eventually(both.first.gone, "its host is clean")
        eventually(lambda: not both.second.below, "the other half has ended, too")
        assert both.second.is_alive
        assert both.second.stop() == 143


def test_hosts_that_were_started_differently_are_told(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    with group(lighthouse, elsewhere, "differs") as both:
        both.second.kill()  # its name is free then
        eventually(lambda: not both.first.below, "the other half has ended, too")
        odd = (*both.options, "--nproc-per-node", "3")
        with further(lighthouse, elsewhere, odd) as other:
            assert other.wait() == 1
            assert "give all hosts of a group the same options" in other.log()
