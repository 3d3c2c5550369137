"""The bar of the training examples, on a terminal and elsewhere."""

import os
import pty
import re
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from examples.daemons import ROOT
from examples.progress_bar import ProgressBar
from tests.processes import PATIENCE_S

ON_A_TERMINAL = """
import logging
from examples.progress_bar import ProgressBar
logging.basicConfig(format="%(message)s")
with ProgressBar(4) as progress:
    progress.show(1, 2, 0.75)
    logging.warning("lost b")
    print("a line of the script")
    progress.show(4, 1, 0.5)
logging.warning("afterwards")
"""


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss is not read before it is shown: on a GPU that would wait for it."""
    unread = MagicMock()
    with ProgressBar(4, lines_every_s=1000.0) as progress:
        progress.show(0, 0, unread)
        progress.show(1, 2, 0.75)
        progress.show(2, 2, unread)
        progress.show(4, 1, 0.5)
        progress.show(4, 1, unread)
    assert capsys.readouterr().out == "step 1: 2 groups, loss 0.750\nstep 4: 1 group, loss 0.500\n"
    assert unread.mock_calls == []


def test_a_line_for_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(9, lines_every_s=0.0) as progress:
        for step in (1, 2, 2, 3):
            progress.show(step, 2, 0.5)
    assert re.findall(r"^step (\d+)", capsys.readouterr().out, re.MULTILINE) == ["1", "2", "3"]


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with ProgressBar(4) as progress:
        progress.show(4, 2, MagicMock())
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_bar_and_what_is_logged_stands_above_it() -> None:
    shown = in_a_terminal(ON_A_TERMINAL)
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    bars = [re.sub(r"[ ━╸╺]+", " ", line) for line in lines if line.startswith("step ")]
    assert "step 1/4 2 groups, loss 0.750, -:--:-- left" in bars, shown
    assert bars[-1] == "step 4/4 1 group, loss 0.500, 0:00:00 left", shown
    told = [line for line in lines if not line.startswith("step ")]
    assert told == ["lost b", "a line of the script", "afterwards"], "each on a line of its own"
    assert lines[-1] == "afterwards"


def in_a_terminal(code: str) -> str:
    """What stands in the end in a terminal without the cursor's moves."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT), "RANK": "0", "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    output = b""
    try:
        while chunk := _read(ours):
            output += chunk
        assert process.wait(PATIENCE_S) == 0, output.decode()
    finally:
        process.kill()
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode()).replace("\r\n", "\n").replace("\r", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its last process has ended
        return b""
