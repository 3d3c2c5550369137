"""The guard inside the test's process, with a child that the kernel does not end."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.guard import process_tree
from manager.guard.child import UNKILLABLE_S, Child
from manager.guard.guard import Guard

PID = 4711


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its


def test_a_rank_that_the_kernel_does_not_end_is_reported(
    control: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its supervisor would take the guard for dead, kill it, and end with all ranks of the host."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(process_tree, "marked_descendants", lambda *_: [PID])
    monkeypatch.setattr(process_tree, "strays", lambda *_: [])
    killed: list[int] = []
    monkeypatch.setattr(process_tree, "kill", killed.extend)
    ours, its = control
    guard = Guard(its)
    output, writing = os.pipe()
    os.set_blocking(output, False)
    os.write(writing, b"cuda: uncorrectable error")
    os.close(writing)
    child = Child(1, "a/0", True, None, tmp_path / "1.json", PID, output)
    guard._children[1] = child  # pyright: ignore[reportPrivateUsage]
    guard._resume(child)  # pyright: ignore[reportPrivateUsage]

    child.kill_at = time.monotonic() - UNKILLABLE_S / 2
    assert guard._select_timeout_s() == pytest.approx(0.02), "it does not spin"  # pyright: ignore[reportPrivateUsage]
    guard._finish_children()  # pyright: ignore[reportPrivateUsage]
    assert (killed, child.status) == ([PID], None)

    child.kill_at -= UNKILLABLE_S
    guard._finish_children()  # pyright: ignore[reportPrivateUsage]
    ended = json.loads(ours.recv(4096))
    text = f"processes [{PID}] cannot be killed: a driver or a file system does not let them end"
    assert (ended["ended"], ended["status"]) == (1, -signal.SIGKILL)
    assert ended["output"] == ["cuda: uncorrectable error", f"({text})"]
    shown = guard._output.next_chunk().decode()  # pyright: ignore[reportPrivateUsage]
    assert shown == f"[a/0] cuda: uncorrectable error\n[a/0] {text}\n"
