"""One replica group on two hosts, in two network namespaces: a supervisor each, one manager."""

import contextlib
import os
import signal
from collections.abc import Generator, Iterator
from typing import NamedTuple

import pytest

from examples.ports import free_port
from tests.daemons.elsewhere import Elsewhere, another_host
from tests.daemons.supervisors import Supervisor, restarted, runs
from tests.processes import Lighthouse, eventually

pytestmark = pytest.mark.slow

SLEEP = "exec sleep 600"
QUICK = ("--restart-delay", "50ms", "--startup-failures", "0", "--grace", "2s", "--nnodes", "2", "--nproc", "2")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with another_host() as there:
        yield there


@pytest.fixture(scope="module")
def lighthouse(elsewhere: Elsewhere) -> Iterator[Lighthouse]:
    with Lighthouse("--bind", f"{elsewhere.here}:0") as process:
        process.host = elsewhere.here
        yield process


class Group(NamedTuple):
    first: Supervisor
    second: Supervisor
    elsewhere: Elsewhere
    options: tuple[str, ...]

    def restarted(self, attempt: int) -> None:
        for supervisor in (self.first, self.second):
            restarted(supervisor, attempt)
            runs(supervisor, 2)


def further(lighthouse: Lighthouse, elsewhere: Elsewhere, options: tuple[str, ...], command: str) -> Supervisor:
    return Supervisor(lighthouse.address, *options, "--node-rank", "1", command=command, prefix=elsewhere.command)


@contextlib.contextmanager
def group(lighthouse: Lighthouse, elsewhere: Elsewhere, run: str, command: str = SLEEP) -> Generator[Group]:
    address = f"{elsewhere.here}:{free_port(elsewhere.here)}"
    options = (*QUICK, "--run-id", run, "--manager", address)
    first = Supervisor(
        lighthouse.address, *options, "--bind", address, "--advertise", elsewhere.here, command=command
    )  # fmt: skip
    second = further(lighthouse, elsewhere, options, command)
    with contextlib.ExitStack() as stack:
        for supervisor in (first, second):
            stack.callback(supervisor.close)
            supervisor.launch()
        for supervisor in (first, second):
            restarted(supervisor, 0)
        yield Group(first, second, elsewhere, options)


def test_the_ranks_are_told_where_they_are(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    command = (
        "echo $RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $MANAGER_ADDRESS"
    )
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
        before = {*runs(both.first, 2), *runs(both.second, 2)}
        os.kill((both.first, both.second)[host].below[0], signal.SIGKILL)
        both.restarted(1)
        assert not before & {*both.first.below, *both.second.below}
        assert both.second.stop() == 143
        assert both.first.wait() == 143
        assert both.first.gone()
        assert both.second.gone()


def test_a_supervisor_killed_elsewhere_leaves_nothing_behind_and_is_waited_for(
    lighthouse: Lighthouse, elsewhere: Elsewhere
) -> None:
    with group(lighthouse, elsewhere, "elsewhere") as both:
        runs(both.first, 2)
        runs(both.second, 2)
        both.second.kill()
        eventually(both.second.gone, "its host is clean")
        eventually(lambda: not both.first.below, "the other half has ended, too")
        assert both.first.is_alive
        with further(lighthouse, elsewhere, both.options, SLEEP) as again:
            restarted(again, 1)
            restarted(both.first, 1)
            assert len(runs(again, 2) + runs(both.first, 2)) == 4
            assert both.first.stop() == 143
            assert again.wait() == 143


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


def test_130_of_a_rank_elsewhere_stops_the_run(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    with group(lighthouse, elsewhere, "abort", f'test "$RANK" != 3 || exit 130; {SLEEP}') as both:
        assert (both.first.wait(), both.second.wait()) == (130, 130)
        assert "rank 3 has ended by exit code 130" in both.first.log()
        assert both.first.gone()
        assert both.second.gone()


def test_hosts_that_were_started_differently_are_told(lighthouse: Lighthouse, elsewhere: Elsewhere) -> None:
    with group(lighthouse, elsewhere, "differs") as both:
        odd = (*both.options, "--nproc", "3")
        with further(lighthouse, elsewhere, odd, SLEEP) as other:
            assert other.wait() == 1
            assert "give all hosts of a group the same options" in other.log()
