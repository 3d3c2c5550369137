"""Descendants of a process, found in /proc.

Even if a process has left its parent, its process group and its session, it is a descendant of the nearest subreaper,
and its environment contains the mark of its ancestor (MARK_VARIABLE). A *stray* is a process that has also dropped the
mark, as with `setsid env -i`. It is recognized as a child of the subreaper that the subreaper did not start.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "LIGHTHOUSE_TREE"
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
# Maximum number of reads, 1 ms apart, during an exec. A deadline could expire merely because the host was paused.
EXEC_LOOKS = 100
EMPTY_LOOKS = 20
"""After this number of reads of the same empty environment, the process counts as started without one."""


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the pids of a process's descendants, excluding zombies."""
    children = _children()
    found: list[int] = []
    below = [root]
    while below:
        below = [child for pid in below for child in children.get(pid, ())]
        found += below
    return [pid for pid in found if not _is_zombie(pid)]


def marked_descendants(root: int, mark: str, session: int = 0) -> list[int]:
    """Return the pids of the descendants of `root` whose MARK_VARIABLE starts with `mark`.

    If `session` is not 0, include the descendants that belong to that session, whatever their mark.
    """
    return [pid for pid in descendants(root) if (session and _session(pid) == session) or _has_mark(pid, mark)]


@dataclass(frozen=True, slots=True)
class Stray:
    """Process that no longer has MARK_VARIABLE, the mark of its ancestor, in its environment."""

    tree: list[int]  # the process and its descendants
    born_at: int  # as returned by born_at()


def strays(root: int, known: Collection[int], marks: Collection[str]) -> list[Stray]:
    """Return the strays: children of the subreaper `root` that it did not start and that carry no mark.

    `known` are the pids of the processes that `root` started, and `marks` their marks.
    """
    children = [pid for pid, parent in _parents() if parent == root and pid not in known and not _is_zombie(pid)]
    found = [pid for pid in children if not _has_mark(pid, *marks)]
    return [Stray([pid, *descendants(pid)], born_at(pid)) for pid in found]


def environment(pid: int) -> bytes:
    """Return the environment with which a process was started, in the format of /proc/PID/environ.

    Return empty bytes if the process has ended, belongs to another user, or was started without an environment.
    The environment also looks empty during a call to exec, so an empty result is read again.
    """
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        return b""
    before: list[str] = []
    seen = 0
    for _ in range(EXEC_LOOKS):
        if (found := _read(pid, "environ")) or not _has_memory(pid):
            return found
        place = _stat(pid)[47:49]  # first and last address of the environment: 0, then equal, then filled in by an exec
        is_empty = len(set(place)) == 1 and "0" not in place
        seen = seen + 1 if is_empty and place == before else 0
        if seen == EMPTY_LOOKS:
            return b""
        before = place
        time.sleep(0.001)
    return b""


def born_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return _stat(pid)[:1] == ["T"]


def forward_signal(root: int, number: int) -> bool:
    """Send a signal to `root` if it handles the signal, or else to its nearest descendants that do.

    The signal would kill a process without a handler. Forked processes inherit handlers, so the search stops at each
    rank and does not reach its data loaders.

    Return True if any process has received the signal.
    """
    children = _children()
    reached, below = False, [root]
    while below:
        pid = below.pop()
        if not _handles(pid, number):
            below += children.get(pid, ())
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            reached = True
    return reached


def _handles(pid: int, number: int) -> bool:
    caught = next((line for line in _read(pid, "status").splitlines() if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def kill(pids: list[int]) -> None:
    send(pids, signal.SIGKILL)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a process that has changed its user
            os.kill(pid, number)


def largest(pids: list[int]) -> int:
    """Return the pid of the process with the most resident memory, which the out-of-memory killer tends to choose."""
    return max(pids, key=lambda pid: int(fields[21]) if (fields := _stat(pid)) else -1)


def _children() -> Mapping[int, list[int]]:
    """Return the pids of all processes on this host, grouped by the pid of their parent."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    return children


def _parents() -> Iterator[tuple[int, int]]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        fields = _stat(pid)
        if fields:
            yield pid, int(fields[1])


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def _has_mark(pid: int, *marks: str) -> bool:
    """Return whether MARK_VARIABLE in the environment of a process starts with one of the marks."""
    signs = tuple(f"{MARK_VARIABLE}={mark}".encode() for mark in marks)
    return any(variable.startswith(signs) for variable in environment(pid).split(b"\0"))


def _has_memory(pid: int) -> bool:
    """Return whether the process has memory. Zombies and kernel threads have none, and therefore no environment."""
    fields = _stat(pid)
    return bool(fields) and int(fields[20]) > 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the state, or an empty list if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _read(pid: int, name: str) -> bytes:
    """Return the content of /proc/PID/NAME, or empty bytes if the process has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
