"""A daemon as the first process of a container: orphans come to it, and no signal has a default action."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import (
    LIGHTHOUSE_CODE,
    LOCALHOST,
    MANAGER_CODE,
    PATIENCE_S,
    ROOT,
    Lighthouse,
    clean_environment,
    eventually,
)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"),
    reason="needs root, unshare and nsenter (util-linux)",
)


@dataclass
class Container:
    """As far as processes go. `first`: the pid of its first process, seen from outside."""

    outside: "subprocess.Popen[bytes]"
    output: Path

    @property
    def first(self) -> int:
        pid = self.outside.pid
        [first] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(first)

    def wait_for(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.output.read_text()), f"{pattern} in {self.output.read_text()}")

    def run(self, script: str) -> str:
        """The output of a script in it, as `kubectl exec` would run it."""
        words = ["nsenter", "--target", str(self.first), "--pid", "--mount", "sh", "-c", script]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    def end(self, number: int) -> int:
        os.kill(self.first, number)
        return self.outside.wait(PATIENCE_S)


@contextlib.contextmanager
def container(folder: Path, code: str, *arguments: str) -> Generator[Container]:
    output = folder / "output"
    words = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable, "-c", code, *arguments]
    with output.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stdout=file, stderr=file)
    try:
        yield Container(process, output)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def reaps_orphans(box: Container) -> bool:
    """A zombie would stay in /proc."""
    orphans = set(box.run("for each in 1 2 3; do sh -c 'sleep 0.2 & echo $!'; done").split())
    return eventually(lambda: not orphans & set(box.run("ls /proc").split()), f"{orphans} are reaped", within_s=20.0)


def test_a_supervisor_reaps_orphans_and_its_ranks_keep_their_statuses(lighthouse: Lighthouse, tmp_path: Path) -> None:
    ranks = 'test "$LIGHTHOUSE_ATTEMPT" != 0 || exit 3; trap "echo asked; exit 0" TERM; echo is up; sleep 600 & wait'
    options = ("--bind", f"{LOCALHOST}:0", "--advertise", LOCALHOST, "--store", f"{LOCALHOST}:1")
    more = ("--replica-id", "first", "--restart-delay", "50ms", "--max-startup-failures", "0")
    words = ("run", "--lighthouse", lighthouse.address, *options, *more, "--", "sh", "-c", ranks)
    with container(tmp_path, MANAGER_CODE, *words) as box:
        box.wait_for(r"first/0\] is up")
        box.wait_for("died: exit code 3")
        assert reaps_orphans(box)
        assert box.end(signal.SIGTERM) == 143
        box.wait_for(r"first/0\] asked")


def test_a_lighthouse_reaps_orphans(tmp_path: Path) -> None:
    words = ("serve", "--bind", f"{LOCALHOST}:0", "--http", f"{LOCALHOST}:0", "--journal", "none")
    with container(tmp_path, LIGHTHOUSE_CODE, *words) as box:
        box.wait_for("serves gRPC on port")
        assert reaps_orphans(box)
        assert box.end(signal.SIGINT) == 0


@pytest.mark.parametrize(("script", "status"), [("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_status_of_the_child_is_that_of_the_container(tmp_path: Path, script: str, status: int) -> None:
    code = f"import os; from lighthouse_runtime.process import commands; commands._run_under_init(); {script}"
    with container(tmp_path, code) as box:
        assert box.outside.wait(PATIENCE_S) == status
