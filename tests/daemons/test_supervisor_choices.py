"""Options of `lighthouse-manager run` that choose what an end means, or where output goes, as a person uses them."""

from pathlib import Path

import pytest

from lighthouse_protocol.messages.run import RunStatus
from lighthouse_runtime.client.clients import LighthouseClient
from tests.daemons.supervisors import ONCE, QUICK, SLEEP, Supervisor
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, run_cli

pytestmark = pytest.mark.slow


def status(lighthouse: Lighthouse, run: str) -> RunStatus:
    with LighthouseClient(lighthouse.address) as client:
        (found,) = client.runs(run)
    return found


class TestExcludeAfter:
    def test_the_host_is_given_up_and_let_in_again_by_resume(self, lighthouse: Lighthouse) -> None:
        options = (*QUICK, "--run-id", "broken", "--nproc-per-node", "2", "--exclude-host-after", "2")
        why = "it was the first to fail 2 times in a row"
        with Supervisor(lighthouse.address, *options, command=f'test "$RANK" != 1 || exit 7; {SLEEP}') as supervisor:
            assert supervisor.wait() == 1
            assert f"exits with 1: host 0 is excluded: {why}" in supervisor.log()
            assert supervisor.log().count("a/1 died: exit code 7") == 2
            assert supervisor.gone()
        (excluded,) = status(lighthouse, "broken").excluded
        assert excluded.reason == why
        assert status(lighthouse, "broken").stop is None
        with Supervisor(lighthouse.address, *options, command="echo started") as again:
            assert again.wait() == 1
            # None of its ranks was ever in a generation: what it asks for is its own affair.
            assert f"host: {excluded.host} is excluded from this run for a: {why}" in again.log()
            assert "[a/0] started" not in again.log()
        assert run_cli(LIGHTHOUSE_CODE, "resume", "--run", "broken", "--lighthouse", lighthouse.address).returncode == 0
        assert status(lighthouse, "broken").excluded == ()
        with Supervisor(lighthouse.address, *options, command="echo started") as repaired:
            assert repaired.wait() == 0
            assert "[a/1] started" in repaired.log()


@pytest.mark.parametrize("tee", [True, False])
def test_output_goes_to_a_file_for_each_rank_and_attempt(lighthouse: Lighthouse, tmp_path: Path, tee: bool) -> None:
    """Of what ends with its lines, what was killed in the middle of one, and what had only just begun."""
    command = f"echo attempt $LIGHTHOUSE_ATTEMPT; {ONCE} echo to stderr >&2; printf half; kill -KILL $$"
    options = ("--log-dir", str(tmp_path / "logs"), *(["--tee"] if tee else []), *QUICK)
    with Supervisor(lighthouse.address, *options, command=command, replica_id="x/y") as supervisor:
        assert supervisor.wait() == 0
        shown = [line for line in supervisor.log().splitlines() if line.startswith("[x/y/0] ")]
        assert "x/y/0 died: SIGKILL (kill -9, or the kernel was out of memory)" in supervisor.log()
    lines = ["attempt 0", "to stderr", "half", "attempt 1"] if tee else []
    assert shown == [f"[x/y/0] {line}" for line in lines]
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert written == {
        "logs/x%2Fy/attempt_0/rank_0.log": "attempt 0\nto stderr\nhalf",
        "logs/x%2Fy/attempt_1/rank_0.log": "attempt 1\n",
    }
