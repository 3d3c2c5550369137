"""The exit table of `lighthouse-manager run`: eight supervisors of one run, and a lighthouse that comes and goes."""

import signal
import time
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.supervisors import ONCE, QUICK, SLEEP, Supervisor, restarted, runs
from tests.processes import LOCALHOST, Lighthouse, eventually, together

pytestmark = pytest.mark.slow


# Two seconds are promised; this machine runs eight supervisors on two cores, with other tests beside them.
STOP_S = 20.0


class TestStopsTheRun:
    """What else does, such as a budget that is exhausted, is in manager/supervisor/scenarios.txt."""

    def test_130_of_one_of_eight(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        go, reason = tmp_path / "go", "rank 0 died: exit code 130"
        script = f'test "$REPLICA_GROUP_ID" = c || {SLEEP}; while ! test -e {go}; do sleep 0.02; done; exit 130'
        run = ("--run-id", "130")
        eight = [Supervisor(lighthouse.address, *run, command=script, replica_id=name) for name in "abcdefgh"]
        with together(*eight):
            for supervisor in eight:
                supervisor.wait_for_log("started ranks")
            began = time.monotonic()
            go.touch()
            statuses = [supervisor.wait() for supervisor in eight]
            took_s = time.monotonic() - began
            assert statuses == [130] * 8, [supervisor.log() for supervisor in eight]
            assert all(supervisor.gone() for supervisor in eight)
            assert all(reason in supervisor.log() for supervisor in eight)
            assert took_s < STOP_S
        with Supervisor(lighthouse.address, *run, command="echo started", replica_id="b") as again:
            assert again.wait() == 130
            assert reason in again.log()
            assert "[b/0] started" not in again.log()
        with Supervisor(lighthouse.address, "--run-id", "130-next", command="true") as next_run:
            assert next_run.wait() == 0

    def test_an_operator(self, lighthouse: Lighthouse) -> None:
        with LighthouseClient(lighthouse.address, run="asked") as client:
            with Supervisor(lighthouse.address, "--run-id", "asked", command=SLEEP) as supervisor:
                runs(supervisor, 1)
                client.stop_run("out of money")
                assert supervisor.wait() == 130
                assert "the run is stopped: out of money" in supervisor.log()
                assert "until `lighthouse resume --run asked`" in supervisor.log()
            client.resume_run()
        with Supervisor(lighthouse.address, "--run-id", "asked", command="true") as again:
            assert again.wait() == 0


class TestStopsNobodyElse:
    def test_a_rank_that_dies(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        go, run = tmp_path / "go", ("--run-id", "dies")
        dies = f"while ! test -e {go}; do sleep 0.02; done; echo oops; kill -SEGV $$"
        script = f'{ONCE} test "$RANK" = 1 || {SLEEP}; {dies}'
        options = (*run, "--nproc-per-node", "2", *QUICK)
        dying = Supervisor(lighthouse.address, *options, command=script, replica_id="dying")
        other = Supervisor(lighthouse.address, *run, command=SLEEP, replica_id="other")
        with together(dying, other):
            other_s = runs(other, 1)
            eventually(lambda: len(dying.below) >= 2, "both ranks run")  # and perhaps a `sleep` of 20 ms
            go.touch()
            assert dying.wait() == 0
            assert runs(other, 1) == other_s
            with LighthouseClient(lighthouse.address, run="dies") as client:
                (status,) = client.runs("dies")
                (summary,) = [each for each in client.incidents() if "run dies: " in each.text]
                (process,) = client.incident(summary.id).evidence
            assert (summary.kind, "SIGSEGV" in summary.text) == (IncidentKind.EXIT, True)
            assert "oops" in process.rank.output
            assert status.stop is None

    def test_a_signal_to_one_supervisor(self, lighthouse: Lighthouse) -> None:
        run = ("--run-id", "signal")
        one = Supervisor(lighthouse.address, *run, command=SLEEP, replica_id="one")
        other = Supervisor(lighthouse.address, *run, command=SLEEP, replica_id="other")
        with together(one, other):
            runs(one, 1)
            runs(other, 1)
            one.signal(signal.SIGINT)
            assert one.wait() == 130
            with LighthouseClient(lighthouse.address) as client:
                assert client.runs("signal")[0].stop is None
            assert len(other.below) == 1
            assert other.stop() == 143


class TestWithoutALighthouse:
    def test_at_the_start_it_waits_and_says_so(self) -> None:
        port = free_port()
        with Supervisor(f"{LOCALHOST}:{port}", command="echo started") as supervisor:
            supervisor.wait_for_log("lighthouse unreachable: .*; the ranks start when it answers")
            assert supervisor.below == []
            with Lighthouse("--bind", f"{LOCALHOST}:{port}"):
                assert supervisor.wait() == 0
                assert "[a/0] started" in supervisor.log()

    def test_the_ranks_are_restarted_all_the_same(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        script = f"{ONCE} while ! test -e {go}; do sleep 0.02; done; exit 1"
        with Lighthouse() as lighthouse, Supervisor(lighthouse.address, *QUICK, command=script) as supervisor:
            supervisor.wait_for_log("started ranks")
            lighthouse.kill()
            supervisor.wait_for_log("lighthouse unreachable: .*; the ranks keep running")
            go.touch()
            restarted(supervisor, 1)
            assert supervisor.wait() == 0

    def test_a_stop_is_kept_until_it_is_back(self, tmp_path: Path) -> None:
        port, journal = free_port(), str(tmp_path / "journal")
        options = ("--bind", f"{LOCALHOST}:{port}", "--journal", journal)
        script = f"while ! test -e {tmp_path / 'go'}; do sleep 0.02; done; exit 130"
        with Lighthouse(*options) as lighthouse:
            one = Supervisor(lighthouse.address, command=script, replica_id="one")
            other = Supervisor(lighthouse.address, command=SLEEP, replica_id="other")
            with together(one, other):
                runs(other, 1)
                lighthouse.kill()
                (tmp_path / "go").touch()
                one.wait_for_log("the lighthouse will receive the stop when it is reachable again")
                eventually(lambda: not one.below, "its ranks have ended")
                with Lighthouse(*options):
                    assert (one.wait(), other.wait()) == (130, 130)
                    assert "one: rank 0 died: exit code 130" in other.log()
