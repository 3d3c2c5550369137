"""The guard inside the test's process, with a child that is none."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manager.guard import process_tree
from manager.guard.child import UNKILLABLE_S, Child
from manager.guard.guard import Guard
from manager.supervisor.rules.plan import Failure, failure_behind

# pyright: reportPrivateUsage=false

PID = 4711

Start = Callable[[bytes], tuple[Guard, Child]]


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its


@pytest.fixture
def start(control: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Make a guard with one child, which has written its whole output."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(process_tree, "marked_descendants", lambda *_: [])
    monkeypatch.setattr(process_tree, "strays", lambda *_: [])

    def start(written: bytes) -> tuple[Guard, Child]:
        output, writing = os.pipe()
        os.set_blocking(output, False)
        os.write(writing, written)
        os.close(writing)
        guard, child = Guard(control[1]), Child(1, "a/0", True, None, tmp_path / "1.json", PID, output)
        guard._children[1] = child
        guard._resume(child)
        return guard, child

    return start


def received(control: tuple[socket.socket, socket.socket]) -> dict[str, Any]:
    return json.loads(control[0].recv(1 << 16))


def test_a_rank_that_the_kernel_does_not_end_is_reported(
    start: Start, control: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its supervisor would take the guard for dead, kill it, and end with all ranks of the host."""
    killed: list[int] = []
    monkeypatch.setattr(process_tree, "marked_descendants", lambda *_: [PID])
    monkeypatch.setattr(process_tree, "kill", killed.extend)
    guard, child = start(b"cuda: uncorrectable error")

    child.kill_at = time.monotonic() - UNKILLABLE_S / 2
    assert guard._select_timeout_s() == pytest.approx(0.02), "it does not spin"
    guard._finish_children()
    assert (killed, child.status) == ([PID], None)

    child.kill_at -= UNKILLABLE_S
    guard._finish_children()
    ended = received(control)
    text = f"processes [{PID}] cannot be killed: a driver or file system blocks them, or another user owns them"
    assert (ended["ended"], ended["status"]) == (1, -signal.SIGKILL)
    assert ended["output"] == ["cuda: uncorrectable error", f"({text})"]
    assert guard._output.next_chunk().decode() == f"[a/0] cuda: uncorrectable error\n[a/0] {text}\n"


def test_the_rank_behind_a_failure_of_torchrun_is_found_before_a_long_traceback(
    start: Start, control: tuple[socket.socket, socket.socket]
) -> None:
    """A script with torch's @record adds its traceback to torchrun's report, after the rank."""
    frames = "".join(f'    File "model.py", line {line}, in forward\n      return layer(x)\n' for line in range(100))
    report = f"""
train.py FAILED
Root Cause (first observed failure):
[0]:
  rank      : 9 (local_rank: 1)
  exitcode  : 1 (pid: 77)
  error_file: /tmp/torchelastic/error.json
  traceback : Traceback (most recent call last):
{frames}  RuntimeError: loss is nan
============================================================
"""
    guard, child = start(report.encode())
    child.record_exit(1)
    guard._finish_children()
    assert failure_behind(1, received(control)["output"]) == Failure(9, 1, 77)


def test_a_daemon_that_floods_the_output_of_its_rank_does_not_keep_the_guard(
    start: Start, control: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has dropped the mark of its tree, so nothing has ended it yet."""
    guard, child = start(b"")
    monkeypatch.setattr(guard, "_read_output", lambda _: True)
    child.record_exit(0)
    guard._finish_children()
    assert received(control)["status"] == 0
