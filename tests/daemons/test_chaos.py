"""Faults that are injected into real supervisors and ranks, refusals at both ends, and a divergence that is found."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_protocol.messages.chaos import FaultKind
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.refusals import NotPermitted, UnknownName
from lighthouse_runtime.client.clients import AsyncLighthouseClient, LighthouseClient
from lighthouse_runtime.process.commands import START_LIGHTHOUSE
from manager.guard.process_tree import is_stopped
from tests.daemons.supervisors import QUICK, SLEEP, Supervisor, python, restarted, runs
from tests.processes import Lighthouse, Manager, Process, eventually, run_cli, together

ALLOW = "--allow-chaos"
OPTIONS = (ALLOW, "--max-restarts", "1000", *QUICK)
# A rank of two processes; the second has more memory, and the first ends with it.
FORKS = (
    "import os, sys, time; child = os.fork(); held = None if child else bytearray(1 << 26); "
    "child or time.sleep(600); sys.exit(os.wait()[1] > 0)"
)


@pytest.fixture(scope="module")
def chaotic() -> Iterator[Lighthouse]:
    with Lighthouse(ALLOW, "--heartbeat-timeout", "1s") as lighthouse:
        yield lighthouse


@pytest.fixture(scope="module")
def client(chaotic: Lighthouse) -> Iterator[LighthouseClient]:
    with LighthouseClient(chaotic.address) as client:
        yield client


class TestRefusals:
    def test_a_lighthouse_without_allow_chaos(self, lighthouse: Lighthouse) -> None:
        with (
            Manager(lighthouse.address, "a", ALLOW),
            LighthouseClient(lighthouse.address) as client,
            pytest.raises(NotPermitted, match="this lighthouse was started without --allow-chaos"),
        ):
            client.inject("a", FaultKind.CUT, seconds=1.0)

    def test_a_manager_without_allow_chaos(self, chaotic: Lighthouse, client: LighthouseClient) -> None:
        with Manager(chaotic.address, "quiet"):
            eventually(lambda: _is_known(client, "quiet"), "a member")
            with pytest.raises(NotPermitted, match="manager of replica group quiet was started without --allow-chaos"):
                client.inject("quiet", FaultKind.CUT, seconds=1.0)
            assert not [each for each in client.incidents() if "quiet" in each.text]

    def test_a_group_that_is_not_there(self, client: LighthouseClient) -> None:
        with pytest.raises(UnknownName):
            client.inject("nobody", FaultKind.CUT, seconds=1.0)

    @pytest.mark.parametrize("options", [("--kinds", "clock"), ("--kinds", "kil"), ("--mtbf", "0s")])
    def test_options_that_make_no_plan(self, chaotic: Lighthouse, options: tuple[str, ...]) -> None:
        found = run_cli(START_LIGHTHOUSE, "chaos", "--lighthouse", chaotic.address, *options)
        assert found.returncode == 2
        assert options[0] in found.stderr


class TestFaults:
    @pytest.fixture
    def supervisor(self, chaotic: Lighthouse, client: LighthouseClient) -> Iterator[Supervisor]:
        with Supervisor(chaotic.address, *OPTIONS, command=SLEEP, replica_id="s") as supervisor:
            eventually(lambda: _is_known(client, "s"), "a member")
            runs(supervisor, 1)
            yield supervisor

    def test_kill(self, supervisor: Supervisor, client: LighthouseClient) -> None:
        incident = client.inject("s", FaultKind.KILL, 0)
        restarted(supervisor, 1)
        found = client.incident(incident).summary
        assert (found.kind, found.text, found.suspects) == (IncidentKind.CHAOS, "kill s/0", ("s/0",))

    def test_a_stopped_rank_continues_when_the_command_ends(self, supervisor: Supervisor, chaotic: Lighthouse) -> None:
        [pid] = supervisor.below

        async def stop() -> None:
            async with AsyncLighthouseClient(chaotic.address) as client:
                call = asyncio.create_task(client.inject("s", FaultKind.STOP, 0, seconds=10.0))
                await asyncio.to_thread(eventually, lambda: is_stopped(pid), "it is stopped")
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call

        asyncio.run(stop())
        eventually(lambda: not is_stopped(pid), "it continues", within_s=5.0)
        assert supervisor.below == [pid]

    def test_a_stopped_rank_continues_at_its_deadline(self, supervisor: Supervisor, client: LighthouseClient) -> None:
        [pid] = supervisor.below
        client.inject("s", FaultKind.STOP, 0, seconds=0.5)
        eventually(lambda: not is_stopped(pid), "it continues", within_s=5.0)
        assert supervisor.below == [pid]

    def test_a_cut_group_comes_back(self, supervisor: Supervisor, client: LighthouseClient) -> None:
        client.inject("s", FaultKind.CUT, seconds=2.5)
        supervisor.wait_for_log("lighthouse chaos: cut s for 2.5 s")
        eventually(lambda: _is_known(client, "s"), "it is back")

    def test_oom_kills_the_largest_process(self, chaotic: Lighthouse, client: LighthouseClient) -> None:
        with Supervisor(chaotic.address, *OPTIONS, command=python(FORKS), replica_id="o") as supervisor:
            first, second = runs(supervisor, 2)
            eventually(lambda: abs(_resident_kib(second) - _resident_kib(first)) > 1 << 15, "one has memory")
            eventually(lambda: _is_known(client, "o"), "a member")
            client.inject("o", FaultKind.OOM, 0)
            supervisor.wait_for_log("o/0 died: exit code 1")  # of the first one, which has seen it


def _is_known(client: LighthouseClient, replica_id: str) -> bool:
    return any(
        member.replica_id == replica_id and member.state != "expired"
        for job in client.status().jobs
        for member in job.members
    )


def _resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


@pytest.mark.slow
class TestTraining:
    """Three groups of one rank each, which train with torch."""

    pytest.importorskip("torch")

    @contextlib.contextmanager
    def _job(self, lighthouse: Lighthouse, folder: Path, **env: str) -> Iterator[tuple[Supervisor, ...]]:
        supervisors = [
            Supervisor(
                lighthouse.address,
                *OPTIONS,
                *("--store", "auto", "--store-port", str(free_port()), "--master-port", str(free_port())),
                command=[sys.executable, "-m", "tests.daemons.chaos_rank", str(folder / name)],
                replica_id=name,
                env={"OMP_NUM_THREADS": "1", **env},
            )
            for name in "abc"
        ]
        with together(*supervisors) as started, LighthouseClient(lighthouse.address) as client:
            eventually(lambda: _trains(client, 20), "all groups train")
            yield started

    def test_all_kinds_are_survived(self, tmp_path: Path) -> None:
        options = ("--for", "60s", "--mtbf", "4s", "--baseline", "5s", "--seed", "11", "--verify", "--json")
        with Lighthouse(ALLOW) as lighthouse, self._job(lighthouse, tmp_path) as supervisors:
            found = run_cli(START_LIGHTHOUSE, "chaos", "--lighthouse", lighthouse.address, *options)
            logs = "".join(supervisor.log() for supervisor in supervisors)
        result = json.loads(found.stdout)
        assert (found.returncode, result["problems"]) == (0, []), found.stderr + logs
        assert result["faults"] == result["survived"] == result["verified"] > 4
        assert "each sample once per epoch" in result["samples"]

    def test_a_nan_and_a_full_disk(self, tmp_path: Path) -> None:
        with (
            Lighthouse(ALLOW) as lighthouse,
            self._job(lighthouse, tmp_path) as (supervisor, *_),
            LighthouseClient(lighthouse.address) as client,
        ):
            client.inject("a", FaultKind.NAN, 0, seconds=10.0)
            kinds = [each.kind for each in client.incidents()]
            assert kinds.count(IncidentKind.NONFINITE) == 1
            client.inject("a", FaultKind.DISK, 0, seconds=5.0)
            supervisor.wait_for_log("the disk is full, as `lighthouse chaos` has ordered")
            before = _checkpoints(tmp_path / "a")
            eventually(lambda: _checkpoints(tmp_path / "a") - before, "a checkpoint after the fault")

    def test_a_group_that_adds_noise_is_found(self, tmp_path: Path) -> None:
        options = ("--for", "10s", "--mtbf", "5s", "--baseline", "2s", "--kinds", "slow", "--verify", "--json")
        with Lighthouse(ALLOW) as lighthouse, self._job(lighthouse, tmp_path, NOISE_GROUP="b"):
            found = run_cli(START_LIGHTHOUSE, "chaos", "--lighthouse", lighthouse.address, *options)
        assert found.returncode == 1
        assert "divergence: b: rank 0: the state of step" in str(json.loads(found.stdout)["problems"])

    def test_ctrl_c_ends_it_with_the_result_so_far(self, tmp_path: Path) -> None:
        options = ("--for", "1h", "--mtbf", "2s", "--baseline", "2s", "--kinds", "stop", "--seed", "1", "--json")
        with Lighthouse(ALLOW) as lighthouse, self._job(lighthouse, tmp_path) as supervisors:
            words = ["chaos", "--lighthouse", lighthouse.address, *options]
            with Process(START_LIGHTHOUSE, words) as command:
                command.wait_for_log("stop [abc]/0 for ")
                command.signal(signal.SIGINT)
                assert command.wait(30.0) == 0
                assert '"problems": []' in command.log()
            for supervisor in supervisors:
                eventually(lambda: not any(map(is_stopped, supervisor.below)), "it continues", within_s=5.0)  # noqa: B023


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def _trains(client: LighthouseClient, step: int) -> bool:
    ranks = [rank for job in client.status(ranks=True).jobs for rank in job.ranks]
    return len(ranks) == 3 and all(rank.step >= step for rank in ranks)
