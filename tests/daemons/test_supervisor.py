"""`lighthouse-manager run` with real processes: what ends how, and that nothing is left behind."""

import contextlib
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from tests.daemons.supervisors import ONCE, QUICK, SLEEP, Supervisor, marked, python, restarted, runs
from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli, together

# A process of its own session and process group, as a daemon is.
SECRET = "known_to_the_group_and_to_this_test"
STRAY = f"{sys.executable} -S -c 'import os, time; os.setsid(); time.sleep(600)' &"


class TestEnds:
    def test_all_done(self, lighthouse: Lighthouse) -> None:
        command = 'echo "I am $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, of $REPLICA_GROUP_ID"'
        with Supervisor(lighthouse.address, "--nproc-per-node", "2", command=command, replica_id="done") as supervisor:
            assert supervisor.wait() == 0
            log = supervisor.log()
        assert "[done/0] I am 0 of 2, 0 of 2, of done\n" in log
        assert "[done/1] I am 1 of 2, 1 of 2, of done\n" in log
        assert "exits with 0: all ranks are done" in log

    def test_a_loss_restarts_the_whole_group(self, lighthouse: Lighthouse) -> None:
        command = f'{ONCE} test "$RANK" = 1 || {SLEEP}; echo bad luck; kill -SEGV $$'
        with Supervisor(lighthouse.address, "--nproc-per-node", "2", *QUICK, command=command) as supervisor:
            assert supervisor.wait() == 0
            log = supervisor.log()
        assert "a/1 died: SIGSEGV\n    | bad luck" in log
        assert "rank 1 died: SIGSEGV; the group restarts" in log
        assert "started ranks [0, 1], attempt 1" in log

    def test_a_crash_at_the_start_is_not_repeated_for_ever(self, lighthouse: Lighthouse) -> None:
        command = "echo no module named torhc; exit 1"
        with Supervisor(lighthouse.address, "--restart-delay", "50ms", command=command) as supervisor:
            assert supervisor.wait() == 1
            log = supervisor.log()
        assert "exits with 1: start-up failure: 3 deaths in a row within 10 s of the start" in log
        assert log.count("| no module named torhc") == 3

    @pytest.mark.slow
    def test_a_command_that_is_none(self, lighthouse: Lighthouse) -> None:
        options = ("--max-restarts", "9", "--max-startup-failures", "1")
        with Supervisor(lighthouse.address, *options, command=["no-such-program"]) as supervisor:
            assert supervisor.wait() == 1
            assert "cannot run no-such-program" in supervisor.log()

    @pytest.mark.parametrize(
        ("number", "status"),
        [
            (signal.SIGTERM, 143),
            pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
            (signal.SIGHUP, 129),
            pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.slow),
        ],
    )
    def test_a_signal_to_the_supervisor(self, lighthouse: Lighthouse, number: int, status: int) -> None:
        with Supervisor(lighthouse.address, "--nproc-per-node", "2", command=f"{STRAY} {SLEEP}") as supervisor:
            runs(supervisor, 4)
            supervisor.signal(number)
            assert supervisor.wait() == status
            assert supervisor.gone()

    def test_a_signal_to_a_further_host_whose_host_0_dies_before_it_has_answered(self, lighthouse: Lighthouse) -> None:
        address = f"127.0.0.1:{free_port()}"
        options = (*QUICK, "--nnodes", "2", "--head", address, "--drain-timeout", "600s", "--run-id", "unanswered")
        env = {MANAGER_SECRET_VARIABLE: SECRET}
        first = Supervisor(lighthouse.address, *options, "--bind", address, command=SLEEP, env=env)
        second = Supervisor(lighthouse.address, *options, "--node-rank", "1", command=SLEEP, env=env)
        with contextlib.closing(first), contextlib.closing(second):
            first.launch()
            second.launch()
            restarted(second, 0)
            first.signal(signal.SIGSTOP)
            second.signal(signal.SIGTERM)
            second.wait_for_log("SIGTERM to the supervisor: host 0 is asked to end the group")
            first.kill()
            assert second.wait() == 143
            assert second.gone()

    def test_a_further_host_logs_once_that_host_0_is_not_there(self, lighthouse: Lighthouse) -> None:
        address = f"127.0.0.1:{free_port()}"
        options = ("--nnodes", "2", "--head", address, "--node-rank", "1", "--node-timeout", "3s", "--run-id", "alone")
        env = {MANAGER_SECRET_VARIABLE: SECRET}
        with Supervisor(lighthouse.address, *options, command=SLEEP, env=env) as supervisor:
            assert supervisor.wait() == 1
            assert "exits with 1: host 0 was unreachable for 3 s" in supervisor.log()
            assert supervisor.log().count("host 0 is unreachable") == 1

    def test_a_warning_is_for_the_ranks_that_handle_it(self, lighthouse: Lighthouse) -> None:
        handles = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3 if os.getpid() != rank else 0))"
        says = "os.write(1, b'works' + bytes([10]))"  # in one write: the two share a pipe
        code = f"import os, signal, sys, time; rank = os.getpid(); {handles}; os.fork(); {says}"
        options = ("--nproc-per-node", "2", "--stop-exit-code", "0")
        shell = f'test "$RANK" = 0 || exec sleep 600; {sys.executable} -c "{code}; time.sleep(600)"; exit 0'
        with Supervisor(lighthouse.address, *options, command=shell) as supervisor:
            supervisor.wait_for_log(r"(?s)\[a/0\] works.*\[a/0\] works")
            supervisor.signal(signal.SIGUSR2)
            supervisor.wait_for_log(r"\[a/0\] SIGUSR2 not forwarded")
            supervisor.signal(signal.SIGUSR1)
            supervisor.wait_for_log(r"\[a/0\] SIGUSR1 forwarded")
            supervisor.wait_for_log(r"\[a/1\] SIGUSR1 not forwarded")
            eventually(lambda: len(supervisor.below) == 1, "rank 0 has ended, and its child; rank 1 sleeps on")
            assert supervisor.stop() == 143
            assert " died: " not in supervisor.log()

    @pytest.mark.parametrize("closed", ["1", pytest.param("0,1,2", marks=pytest.mark.slow)])
    def test_closed_streams_and_blocked_signals_are_inherited(
        self, lighthouse: Lighthouse, tmp_path: Path, closed: str
    ) -> None:
        """What a daemoniser or an init script leaves behind."""
        begun, script = tmp_path / "begun", tmp_path / "script.sh"
        script.write_text(f"echo $$ >{begun}.new; mv {begun}.new {begun}; echo written; exec sleep 600")
        blocked = f"signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); os.closerange({closed[0]}, 3)"
        if closed == "1":
            blocked = blocked.replace("os.closerange(1, 3)", "os.close(1)")
        starts = [sys.executable, "-c", f"import os, signal, sys; {blocked}; os.execv(sys.executable, sys.argv[1:])"]
        supervisor = Supervisor(lighthouse.address, command=["sh", str(script)], prefix=starts)
        with contextlib.closing(supervisor):
            supervisor.launch()  # without standard error it writes no log that could say when it is ready
            eventually(begun.exists, "the rank runs")
            assert supervisor.stop() == 143
            assert supervisor.gone()

    def test_a_module_as_the_command(self, lighthouse: Lighthouse) -> None:
        with Supervisor(lighthouse.address, command=["-m", "json.tool", "--help"]) as supervisor:
            assert supervisor.wait() == 0
            assert re.search(r"\[a/0\] usage: .*json.tool", supervisor.log())

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
    def test_a_full_log_disk_costs_nothing_but_the_log(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        disk, go = tmp_path / "disk", tmp_path / "go"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
        try:
            (disk / "filler").write_bytes(bytes(40_000))
            script = f"seq 8000; while ! test -e {go}; do sleep 0.02; done; echo last; exit 0"
            with Supervisor(lighthouse.address, "--log-dir", str(disk / "logs"), command=script) as supervisor:
                supervisor.wait_for_log(r"\[a/0\] cannot write .*rank_0.log: No space left on device; the rank")
                (disk / "filler").unlink()
                go.touch()
                assert supervisor.wait() == 0
                assert re.search(r"rank_0.log is writable again; \d+ bytes are missing", supervisor.log())
                assert len(re.findall("cannot write", supervisor.log())) == 1
            assert (disk / "logs/a/attempt_0/rank_0.log").read_text().endswith("last\n")
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_a_save_at_the_end_has_its_grace(self, lighthouse: Lighthouse) -> None:
        # It waits for the signal itself: a handler may run inside the first print(), and a print() in it then fails.
        wait = "signal.pthread_sigmask(signal.SIG_BLOCK, {15}); print('works', flush=True); signal.sigwait({15})"
        rank = f"import signal, time; {wait}; time.sleep(1); print('saved')"
        with Supervisor(lighthouse.address, "--termination-grace", "20s", command=python(rank)) as supervisor:
            supervisor.wait_for_log(r"\[a/0\] works")
            supervisor.signal(signal.SIGTERM)
            assert supervisor.wait() == 143
            assert "[a/0] saved" in supervisor.log()

    @pytest.mark.parametrize("source", ["file", "kubernetes"])
    def test_a_notice_gives_a_script_without_an_agent_the_time_that_is_left(
        self, lighthouse: Lighthouse, tmp_path: Path, source: str
    ) -> None:
        script = "trap 'sleep 1.5; echo saved; exit 0' TERM; echo runs; while :; do sleep 0.05; done"
        chosen = f"file={tmp_path}/notice" if source == "file" else source
        options = ("--preemption", chosen, "--preemption-grace", "60s", "--termination-grace", "500ms")
        with Supervisor(lighthouse.address, *options, command=script) as supervisor:
            supervisor.wait_for_log("runs")
            if source == "file":
                (tmp_path / "notice").write_text("60")
                supervisor.wait_for_log(r"no Agent is connected: the ranks receive SIGTERM, and have 5\d s")
            else:
                supervisor.signal(signal.SIGTERM)
            assert supervisor.wait() == 143
            assert "saved" in supervisor.log()
            assert "leaves after its step" not in supervisor.log()

    def test_a_kill_is_a_restart(self, lighthouse: Lighthouse) -> None:
        options = {"command": SLEEP, "replica_id": "killed", "env": {MANAGER_SECRET_VARIABLE: SECRET}}
        with Supervisor(lighthouse.address, *QUICK, **options) as supervisor:
            address = supervisor.wait_for_log(r"serves on (\S+);")[1]
            first = runs(supervisor, 1)
            with ManagerClient(address, SECRET) as client:
                client.kill("stuck")
            restarted(supervisor, 1)
            assert runs(supervisor, 1) != first
            assert supervisor.stop() == 143


class TestNothingIsLeftBehind:
    def test_by_a_supervisor_that_is_killed(self, lighthouse: Lighthouse) -> None:
        with Supervisor(lighthouse.address, "--nproc-per-node", "2", command=f"{STRAY} {SLEEP}") as supervisor:
            runs(supervisor, 4)
            supervisor.kill()
            eventually(supervisor.gone, "no orphan is left")

    def test_by_a_guard_that_is_killed(self, lighthouse: Lighthouse) -> None:
        with Supervisor(lighthouse.address, command=f"{STRAY} {SLEEP}") as supervisor:
            runs(supervisor, 2)
            os.kill(supervisor.guard(), signal.SIGKILL)
            assert supervisor.wait() == 1
            assert supervisor.gone()
            assert "the guard process ended with status -9" in supervisor.log()

    def test_by_a_rank_that_dies(self, lighthouse: Lighthouse) -> None:
        command = f"{STRAY} {ONCE} sleep 0.3; kill -KILL $$"
        with Supervisor(lighthouse.address, *QUICK, command=command) as supervisor:
            assert supervisor.wait() == 0
            assert marked(supervisor.mark) == []

    @pytest.mark.slow
    def test_by_one_that_does_not_listen(self, lighthouse: Lighthouse) -> None:
        command = "trap '' TERM; echo ready; while :; do sleep 600; done"
        with Supervisor(lighthouse.address, "--termination-grace", "300ms", command=command) as supervisor:
            supervisor.wait_for_log(r"\[a/0\] ready")
            assert supervisor.stop() == 143
            assert supervisor.gone()


class TestStrays:
    """A process that has left its session and thrown off its environment survived its rank, and the guard's end."""

    def escape(self, rank: str) -> tuple[str, str]:
        """What the shell runs, and how the stray is known."""
        seconds = f"{600 + secrets.randbelow(10**9) / 1e9:.9f}"
        return f"setsid env -i sleep {seconds} & sleep 0.3; {rank}", seconds

    def test_one_ends_before_its_group_is_started_again(self, lighthouse: Lighthouse) -> None:
        command, seconds = self.escape("kill -SEGV $$")
        with Supervisor(
            lighthouse.address, *QUICK, command=f'test "$LIGHTHOUSE_ATTEMPT" = 0 || {SLEEP}; {command}'
        ) as s:
            eventually(lambda: running(seconds), "the stray runs")
            restarted(s, 1)
            eventually(lambda: not running(seconds), "it has ended")
            assert s.is_alive

    def test_by_a_guard_that_is_killed(self, lighthouse: Lighthouse) -> None:
        command, seconds = self.escape(SLEEP)
        with Supervisor(lighthouse.address, command=command) as supervisor:
            eventually(lambda: running(seconds), "the stray runs")
            os.kill(supervisor.guard(), signal.SIGKILL)
            assert supervisor.wait() == 1
            assert running(seconds) == []

    def test_one_stays_while_a_rank_runs_that_may_have_started_it(self, lighthouse: Lighthouse) -> None:
        command, seconds = self.escape(f'test "$RANK" = 0 && {SLEEP}; exit 7')
        only = f'test "$RANK$LIGHTHOUSE_ATTEMPT" = 00 || test "$RANK$LIGHTHOUSE_ATTEMPT" = 10 || {SLEEP};'
        options = ("--nproc-per-node", "2", "--restart-scope", "rank", *QUICK)
        with Supervisor(lighthouse.address, *options, command=f"{only} {command}") as supervisor:
            restarted(supervisor, 1)
            assert len(running(seconds)) == 2
            assert supervisor.stop() == 143
            assert running(seconds) == []


class TestAGuardThatIsStopped:
    """The supervisor ignored SIGTERM for as long as its guard was stopped."""

    def test_goes_on_and_the_supervisor_ends_in_good_order(self, lighthouse: Lighthouse) -> None:
        with Supervisor(lighthouse.address, command=SLEEP) as supervisor:
            runs(supervisor, 1)
            os.kill(supervisor.guard(), signal.SIGSTOP)
            assert supervisor.stop() == 143
            assert supervisor.gone()

    def test_a_log_that_is_a_pipe_which_nobody_reads_holds_up_nothing(
        self, lighthouse: Lighthouse, tmp_path: Path
    ) -> None:
        pipe = tmp_path / "a" / "attempt_0" / "rank_0.log"
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
        options = ("--log-dir", str(tmp_path), "--max-startup-failures", "1")
        with Supervisor(lighthouse.address, *options, command=SLEEP) as supervisor:
            assert supervisor.wait() == 1
            assert "is not a regular file of this user only" in supervisor.log()


def running(seconds: str) -> list[int]:
    """The processes `sleep SECONDS`."""
    said = f"sleep\0{seconds}\0".encode()
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and _command(each) == said]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_background_start_does_not_make_ranks_deaf_to_sigint(lighthouse: Lighthouse) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with Supervisor(lighthouse.address, command=python(code), preexec_fn=ignore) as supervisor:
        assert supervisor.wait() == 0
        assert "[a/0] True" in supervisor.log()


def test_ranks_have_the_priority_that_the_supervisor_began_with(lighthouse: Lighthouse) -> None:
    """Its own is higher, where it may be."""
    code = "import os; print('nice', os.getpriority(os.PRIO_PROCESS, 0))"
    with Supervisor(lighthouse.address, command=python(code)) as supervisor:
        assert supervisor.wait() == 0
        assert f"[a/0] nice {os.getpriority(os.PRIO_PROCESS, 0)}" in supervisor.log()


def test_a_failed_health_check_excludes_the_host_before_anything_runs(lighthouse: Lighthouse) -> None:
    options = ("--health-check", "sh -c 'echo GPU 3 has fallen off the bus; exit 7'", "--run-id", "unhealthy")
    with Supervisor(lighthouse.address, *options, command="echo started") as supervisor:
        assert supervisor.wait() == 1
        log = supervisor.log()
    assert "host 0 is excluded: its health check failed: exit code 7: GPU 3 has fallen off the bus" in log
    assert "[a/0] started" not in log


# It is there, as its manager sees it, once a file is.
WATCHED = """
import os, pathlib, sys, time
from agent_client.manager_client.client import ManagerConnection
from lighthouse_runtime.client.clients import manager_at
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
here, address = "w" + os.environ["LIGHTHOUSE_ATTEMPT"], os.environ["LIGHTHOUSE_MANAGER_ADDRESS"]
manager = manager_at(address, os.environ["LIGHTHOUSE_MANAGER_SECRET"]).join_string()
link = ManagerConnection(manager, 0, here, lambda *_: None, returns_within_s=60)
link.ensure_watched()
time.sleep(600)
"""


def test_a_group_is_starting_until_its_ranks_are_there(lighthouse: Lighthouse, tmp_path: Path) -> None:
    def is_told(*states: str) -> None:
        def state() -> str:
            with LighthouseClient(lighthouse.address) as client:
                [job] = client.status().jobs
            return next((member.state.value for member in job.members if member.replica_id == "slow"), "")

        eventually(lambda: state() in states, f"one of {states}")

    go = tmp_path / "go"
    command = [sys.executable, "-c", WATCHED, str(go)]
    with Supervisor(lighthouse.address, *QUICK, command=command, replica_id="slow") as supervisor:
        is_told("starting")
        go.touch()
        is_told("idle", "straggler")
        go.unlink()
        os.kill(runs(supervisor, 1)[0], signal.SIGKILL)
        restarted(supervisor, 1)
        is_told("starting")


MISFIT = """
import os, sys
from agent_client.manager_client.client import ManagerConnection
from lighthouse_runtime.client.clients import manager_at
here, address = "w" + os.environ["LIGHTHOUSE_ATTEMPT"], os.environ["LIGHTHOUSE_MANAGER_ADDRESS"]
manager = manager_at(address, os.environ["LIGHTHOUSE_MANAGER_SECRET"]).join_string()
link = ManagerConnection(manager, 0, here, lambda *_: None, returns_within_s=60)
link.ask(0, "", tag_quorum_id=0, commit_failures=0, timeout_s=60)
link.report("ModelMismatch: another width", ends_group=True)
sys.exit(1)
"""


def test_a_misfit_ends_once_its_restarts_are_used_up() -> None:
    """What its rank reports so, and what that costs the peers: test_misfits.py and agent_client/test_mismatch.py."""
    cause, run = "ModelMismatch: another width", ("--run-id", "misfit")
    with Lighthouse("--join-timeout", "1s") as lighthouse:
        options = (*run, *QUICK, "--max-restarts", "1")
        misfit = Supervisor(lighthouse.address, *options, command=[sys.executable, "-c", MISFIT], replica_id="c")
        other = Supervisor(lighthouse.address, *run, command=SLEEP, replica_id="other")
        with together(misfit, other):
            others = runs(other, 1)
            assert misfit.wait() == 1
            why = f"2 of them because this group does not fit its peers; rank 0 died: exit code 1: {cause}"
            assert f"exits with 1: the budget of 1 restarts within 3600 s is exhausted, {why}" in misfit.log()
            assert other.below == others
            with LighthouseClient(lighthouse.address) as client:
                assert client.runs("misfit")[0].stop is None


def test_a_secret_that_a_rank_prints_bare_is_in_no_log_line_incident_or_bundle(
    lighthouse: Lighthouse, tmp_path: Path
) -> None:
    secret, bundle = secrets.token_hex(32), tmp_path / "bundle.tar.gz"
    command = f'{ONCE} echo "environment: ${MANAGER_SECRET_VARIABLE}"; exit 3'
    options = ("--job", "bare", "--run-id", "bare", *QUICK)
    with Supervisor(lighthouse.address, *options, command=command, env={MANAGER_SECRET_VARIABLE: secret}) as supervisor:
        assert supervisor.wait() == 0
        log = supervisor.log()
    assert f"[a/0] environment: {secret}\n" in log
    assert "| environment: (removed)\n" in log
    assert log.count(secret) == 1
    options = ("--lighthouse", lighthouse.address, "--http", lighthouse.http.removeprefix("http://"))
    assert run_cli(LIGHTHOUSE_CODE, "debug", "bundle", "--out", str(bundle), *options).returncode == 0
    with tarfile.open(bundle) as tar:
        parts = {entry.name: file.read().decode() for entry in tar if (file := tar.extractfile(entry))}
    assert "environment: (removed)" in parts["lighthouse-debug/incidents.json"]
    assert not [name for name, text in parts.items() if secret in text]
