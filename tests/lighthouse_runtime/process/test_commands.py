"""The console commands before and outside of a verb: inherited signals, interrupts during imports, failing output."""

import signal
import subprocess
import sys

import pytest

from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER
from tests.processes import PATIENCE_S, clean_environment

_INTERRUPTED = """
import os, signal
from lighthouse_runtime.process import commands

load = commands._load
commands._load = lambda package: (os.kill(os.getpid(), signal.SIGINT), load(package))
commands.lighthouse()
"""

_STATUS_OF_A_CHILD = """
import os, sys
from lighthouse_runtime.process import commands

commands._load = lambda package: sys.exit(os.waitstatus_to_exitcode(os.waitpid(os.fork() or os._exit(3), 0)[1]))
commands.lighthouse()
"""


def _run(code: str, *arguments: str, stdout: str = "/dev/null") -> tuple[int, str]:
    command = [sys.executable, "-c", code, *arguments]
    with open(stdout, "w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.PIPE, text=True, env=clean_environment(), timeout=PATIENCE_S
        )
    return done.returncode, done.stderr


def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback() -> None:
    assert _run(_INTERRUPTED, "--version") == (-signal.SIGINT, "")


def test_a_background_job_ignores_ctrl_c() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + _INTERRUPTED
    assert _run(ignoring, "--version") == (0, "")


@pytest.mark.parametrize("arguments", [(START_LIGHTHOUSE, "--help"), (START_MANAGER, "run", "--help")])
def test_help_that_cannot_be_written_is_an_error(arguments: tuple[str, ...]) -> None:
    assert _run(*arguments, stdout="/dev/full") == (1, "Error: cannot write to stdout: No space left on device\n")


def test_a_parent_that_ignores_sigchld_costs_no_exit_status() -> None:
    ignoring = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{_STATUS_OF_A_CHILD}"
    assert _run(ignoring) == (3, "")


def test_the_first_process_of_a_container_ends_with_its_child_even_if_sigchld_was_ignored() -> None:
    first = "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.getpid = lambda: 1\n"
    assert _run(first + _STATUS_OF_A_CHILD) == (3, "")
