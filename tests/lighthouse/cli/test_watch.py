import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lighthouse.cli.status import watch as command
from lighthouse_protocol.refusals import Unreachable
from tests.lighthouse.statuses import job, member, status
from tests.processes import PATIENCE_S

UP = status(job(member("a")))
GONE = Unreachable("host:1 is unreachable: refused")
ROOT = Path(__file__).parents[3]

# `lighthouse watch` beside a lighthouse that is away while a file exists.
WATCHED = """
import os, sys
from lighthouse_runtime.client import clients
from lighthouse.cli.status import watch
from tests.lighthouse.cli.conftest import FakeClient, FakeLighthouse
from tests.lighthouse.cli.test_watch import GONE, UP

class Lighthouse(FakeLighthouse):
    def answer(self, **asked):
        if os.path.exists(sys.argv[1]):
            raise GONE
        return UP

clients.LighthouseClient = lambda coordinator, *, job, run, role: FakeClient(Lighthouse(), coordinator, job, run)
watch(["--interval", "50ms"])
"""


def test_prints_a_block_per_interval_where_there_is_no_terminal(fake, run):
    fake.answers = [UP]
    lines = run(command, "--interval", "10ms", "--count", "2").output.splitlines()
    assert len(lines) == 16
    assert [line[:3] for line in lines[::8]] == ["-- ", "-- "]
    assert lines[1] == "lighthouse 0.1.0 at localhost:29510, up 1h06m"
    assert lines[7].split()[:2] == ["a", "participant"]


def test_survives_a_lighthouse_that_goes_and_comes_back(fake, run):
    fake.answers = [GONE, UP, GONE, UP]
    result = run(command, "--interval", "10ms", "--count", "4")
    heads = [line for line in result.output.splitlines() if line.startswith("lighthouse ")]
    assert result.exit_code == 0
    assert [head.split()[1] for head in heads] == ["unreachable", "0.1.0", "unreachable", "0.1.0"]
    assert "this is of" in heads[2]
    assert "this is of" not in heads[0]


def test_json_is_a_document_a_line_and_trouble_goes_to_stderr_once(fake, run):
    fake.answers = [UP, GONE, GONE, UP]
    result = run(command, "--interval", "10ms", "--count", "4", "--format", "json")
    assert [json.loads(line)["version"] for line in result.stdout.splitlines()] == ["0.1.0", "0.1.0"]
    assert result.stderr == "Error: host:1 is unreachable: refused\n"


def test_the_status_tells_whether_the_last_answer_came(fake, run):
    fake.answers = [UP, GONE]
    assert run(command, "--interval", "10ms", "--count", "2").exit_code == 1


def test_asks_every_interval(fake, run):
    began_at = time.monotonic()
    run(command, "--interval", "100ms", "--count", "3")
    assert time.monotonic() - began_at >= 0.2
    assert len(fake.calls) == 3


@pytest.mark.parametrize("args", [["--interval", "0"], ["--count", "0"]])
def test_refuses_nonsense(run, args):
    result = run(command, *args)
    assert result.exit_code == 2
    assert args[0] in result.stderr


class Terminal:
    """`lighthouse watch` on a terminal of 80 by 24."""

    def __init__(self, away: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHED, str(away)],
            cwd=ROOT,
            env=environment | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.seen = b""

    def wait_for(self, text: bytes) -> None:
        start = len(self.seen)
        while text not in self.seen[start:]:
            self.seen += os.read(self._ours, 65536)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        try:
            while chunk := os.read(self._ours, 65536):
                self.seen += chunk
        except OSError:
            pass
        os.close(self._ours)
        return self.process.wait(PATIENCE_S)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_on_a_terminal_it_shows_the_outage_and_leaves_all_in_order(tmp_path, number, status):
    away = tmp_path / "away"
    terminal = Terminal(away)
    terminal.wait_for(b"participant")
    away.touch()
    terminal.wait_for(b"lighthouse unreachable since")
    away.unlink()
    terminal.wait_for(b"lighthouse 0.1.0 at")
    assert terminal.end(number) == status
    assert b"\x1b[?1049h" in terminal.seen
    assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l")
    assert b"Traceback" not in terminal.seen


def test_a_reader_that_has_read_enough_is_no_error(tmp_path):
    child = [sys.executable, "-c", WATCHED.replace('"50ms"', '"10ms", "--format", "json"'), str(tmp_path / "away")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(child, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 0
