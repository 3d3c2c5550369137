"""Options of `lighthouse-manager run` that choose what an end means, or where output goes, as a person uses them."""

import signal
from pathlib import Path

import pytest

from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_runtime.client.lighthouse import LighthouseClient
from lighthouse_runtime.client.manager import ManagerClient
from tests.daemons.supervisors import Supervisor, restarted, runs
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli, together

pytestmark = pytest.mark.slow

SLEEP = "exec sleep 600"
QUICK = ("--restart-delay", "50ms", "--startup-failures", "0")
ONCE = 'test "$LIGHTHOUSE_ATTEMPT" = 0 || exit 0;'
# Rank 1 dies in the first `times` attempts; then all go on.
DIES = 'test "$RANK" != 1 || test "$LIGHTHOUSE_ATTEMPT" -ge {times} || exit 7; ' + SLEEP


def status(lighthouse: Lighthouse, run: str, job: str = DEFAULT_JOB) -> RunStatus:
    with LighthouseClient(lighthouse.address, job=job) as client:
        (found,) = client.runs(run)
    return found


def told(lighthouse: Lighthouse, *words: str) -> str:
    """What a command of the lighthouse's says, once it has done what it was told to."""
    ended = run_cli(LIGHTHOUSE_CODE, *words, "--lighthouse", lighthouse.address)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def is_known(supervisor: Supervisor) -> bool:
    with ManagerClient(supervisor.wait_for_log(r"serves on (\S+);")[1]) as manager:
        return manager.status().lighthouse_reachable


class TestExcludeAfter:
    def test_the_host_is_given_up_and_let_in_again_by_resume(self, lighthouse: Lighthouse) -> None:
        options = (*QUICK, "--run-id", "broken", "--nproc", "2", "--exclude-after", "2")
        why = "it was the first to fail 2 times in a row"
        with Supervisor(lighthouse.address, *options, command=DIES.format(times=9)) as supervisor:
            assert supervisor.wait() == 1
            assert f"ends with 1: host 0 is excluded: {why}" in supervisor.log()
            assert supervisor.log().count("a/1 has ended by exit code 7") == 2
            assert supervisor.gone()
        (excluded,) = status(lighthouse, "broken").excluded
        assert excluded.reason == why
        assert status(lighthouse, "broken").stop is None
        with Supervisor(lighthouse.address, *options, command="echo started") as again:
            assert again.wait() == 1
            assert f"host: {excluded.host} is excluded from this run: {why}" in again.log()
            assert "[a/0] started" not in again.log()
        told(lighthouse, "resume", "--run", "broken")
        assert status(lighthouse, "broken").excluded == ()
        with Supervisor(lighthouse.address, *options, command="echo started") as repaired:
            assert repaired.wait() == 0
            assert "[a/1] started" in repaired.log()

    def test_fewer_losses_than_that_are_restarts(self, lighthouse: Lighthouse) -> None:
        options = (*QUICK, "--run-id", "flaky", "--nproc", "2", "--exclude-after", "3")
        with Supervisor(lighthouse.address, *options, command=DIES.format(times=2)) as supervisor:
            restarted(supervisor, 2)
            runs(supervisor, 2)
            assert status(lighthouse, "flaky").excluded == ()
            assert supervisor.stop() == 143


class TestTee:
    def test_output_is_shown_and_kept_for_each_attempt(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        """Of what ends with its lines, what was killed in the middle of one, and what had only just begun."""
        command = f"echo attempt $LIGHTHOUSE_ATTEMPT; {ONCE} echo to stderr >&2; printf half; kill -KILL $$"
        options = ("--log-dir", str(tmp_path / "logs"), "--tee", *QUICK)
        with Supervisor(lighthouse.address, *options, command=command) as supervisor:
            assert supervisor.wait() == 0
            shown = [line for line in supervisor.log().splitlines() if line.startswith("[a/0] ")]
            assert "a/0 has ended by SIGKILL (kill -9, or the kernel was out of memory)" in supervisor.log()
        assert shown == ["[a/0] attempt 0", "[a/0] to stderr", "[a/0] half", "[a/0] attempt 1"]
        written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
        assert written == {
            "logs/a/attempt_0/rank_0.log": "attempt 0\nto stderr\nhalf",
            "logs/a/attempt_1/rank_0.log": "attempt 1\n",
        }


class TestRestartAfterKill:
    @pytest.mark.parametrize(("choice", "comes_back"), [("yes", True), ("no", False)])
    def test_a_group_that_a_person_kills(self, lighthouse: Lighthouse, choice: str, comes_back: bool) -> None:
        """Whether its ranks start again is its choice; the other group of the run goes on."""
        named = ("--run-id", f"kill-{choice}", "--job", f"kill-{choice}")
        options = (*named, *QUICK, "--restart-after-kill", choice)
        killed = Supervisor(lighthouse.address, *options, command=SLEEP, replica_id="killed")
        other = Supervisor(lighthouse.address, *named, command=SLEEP, replica_id="other")
        with together(killed, other):
            first, others = runs(killed, 1), runs(other, 1)
            eventually(lambda: is_known(killed), "its manager has a session")
            assert "killed" in told(lighthouse, "kill", "killed", "--force", "--job", named[-1], "--reason", "it hangs")
            if comes_back:
                restarted(killed, 1)
                assert runs(killed, 1) != first
                killed.signal(signal.SIGTERM)
            assert killed.wait() == (143 if comes_back else 1)
            assert killed.gone()
            assert "killed by the lighthouse: it hangs" in killed.log()
            assert ("ends with 1: killed: by request" in killed.log()) is not comes_back
            assert other.below == others
            assert "started ranks [0], attempt 1" not in other.log()
            assert status(lighthouse, named[1], named[-1]).stop is None
