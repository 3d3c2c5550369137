"""The console commands before and outside of a verb: interrupts during imports, and output that fails."""

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
