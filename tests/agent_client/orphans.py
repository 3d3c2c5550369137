"""Processes that a training process has forked, and that outlive it with its connections open."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lighthouse_runtime.process.children import started_at

ESTABLISHED = "01"
GONE_WITHIN_S = 5.0

Process = tuple[int, int]
"""Its pid, and when it was started."""


class Orphans:
    """The children that the process `parent` has now. They are ended with the block."""

    def __init__(self, parent: int) -> None:
        self._processes: list[Process] = [(pid, started_at(pid)) for pid in _children(parent)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        for pid, started in self._processes:
            if _is_running(pid, started):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ends_at = time.monotonic() + GONE_WITHIN_S
        while self.running() and time.monotonic() < ends_at:
            time.sleep(0.01)

    def running(self) -> list[int]:
        return [pid for pid, started in self._processes if _is_running(pid, started)]

    def connected_to(self, peers: Iterable[int]) -> list[int]:
        """Those that run and hold a connection to each of the processes `peers`."""
        held = [_connections(peer) for peer in peers]
        return [pid for pid in self.running() if all(_connections(pid) & _reversed(those) for those in held)]


Ends = tuple[str, str]


def _connections(pid: int) -> set[Ends]:
    """(here, there) of each TCP connection that the process holds."""
    inodes = _sockets(pid)
    return {(row[1], row[2]) for row in _tcp_table(pid) if row[3] == ESTABLISHED and row[9] in inodes}


def _reversed(connections: set[Ends]) -> set[Ends]:
    return {(there, here) for here, there in connections}


def _tcp_table(pid: int) -> Sequence[Sequence[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]


def _sockets(pid: int) -> set[str]:
    """By inode."""
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(descriptor)
            if name.startswith("socket:["):
                found.add(name[len("socket:[") : -1])
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _is_running(pid: int, started: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and started_at(pid) == started
