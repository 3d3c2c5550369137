"""A daemon's standard error whose reader is paused or gone."""

import os
import subprocess
import sys

from tests.processes import PATIENCE_S, clean_environment

_DAEMON = """
import logging, signal
from lighthouse_runtime.process.logs import set_up_logging
from lighthouse_runtime.process.standard_error import StandardError

signal.alarm(30)
set_up_logging("info", "text", output=StandardError())
for number in range(3000):
    logging.getLogger("x").info("line %d", number)
input("still running")
logging.getLogger("x").info("last")
"""


def test_a_paused_reader_blocks_no_daemon_and_loses_no_line() -> None:
    reading, writing = os.pipe()
    with (
        subprocess.Popen(
            [sys.executable, "-c", _DAEMON],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=writing,
            env=clean_environment(),
        ) as process,
        open(reading) as lines,
    ):
        os.close(writing)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(13) == b"still running"
        process.stdin.write(b"\n")
        process.stdin.close()
        found = [line.partition("x: ")[2] for line in lines.read().splitlines()]
        assert process.wait(PATIENCE_S) == 0
    assert found == [*(f"line {number}" for number in range(3000)), "last"]


def test_a_reader_that_has_gone_ends_no_daemon() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", _DAEMON],
        input=b"\n",
        stdout=subprocess.PIPE,
        stderr=writing,
        env=clean_environment(),
        timeout=PATIENCE_S,
    )
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"still running")
