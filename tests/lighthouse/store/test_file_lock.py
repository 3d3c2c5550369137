"""What happens between two system calls of a claim; test_sqlite.py has the rest, with real processes."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lighthouse.store import file_lock
from lighthouse.store.file_lock import FileLock
from lighthouse_protocol.refusals import WrongState


def name(pid: int) -> str:
    return json.dumps({"pid": pid, "host": socket.gethostname(), "since": "now", "owner": ""})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_lock_on_a_file_that_its_holder_has_just_removed_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.with_name("file.lock").unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    first = FileLock(path)
    first.take()
    with pytest.raises(WrongState, match="held by"):
        FileLock(path).take()
    first.drop()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("left_there", ["", "dead"])
def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(path: Path, left_there: str) -> None:
    lock = path.with_name("file.lock")
    lock.write_text(left_there and name(dead_pid()))
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = threading.Timer(file_lock.NAME_WAIT_S / 5, lock.write_text, (name(os.getpid()),))
        writer.start()
        with pytest.raises(WrongState, match=f"a lighthouse \\(pid {os.getpid()} on host"):
            FileLock(path).take()
        writer.join()


def test_a_holder_that_has_written_its_name_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "NAME_WAIT_S", 1e6)
    first = FileLock(path, "first")
    first.take()
    with pytest.raises(WrongState, match="held by the lighthouse at first"):
        FileLock(path).take()
    first.drop()
    assert list(path.parent.iterdir()) == []
