"""Descendants of a process, found in /proc.

A process that has left its parent, its process group and its session still descends from the next subreaper, and still
has the mark of its ancestor in its environment (MARK_VARIABLE). A stray has dropped the mark, too (`setsid env -i`). It
is recognized as a child of the subreaper that the subreaper has not started.
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
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
EXEC_LOOKS = 100  # reads of a process within an exec, 1 ms apart; a deadline could expire during a pause of the host


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def descendants(root: int) -> list[int]:
    """Return the running descendants of a process, without zombies."""
    children = _children()
    found: list[int] = []
    below = [root]
    while below:
        below = [child for pid in below for child in children.get(pid, ())]
        found += below
    return [pid for pid in found if not _is_zombie(pid)]


def marked(root: int, mark: str, session: int = 0) -> list[int]:
    """Return the descendants of `root` in a session, or with a mark that begins with `mark`."""
    sign = f"{MARK_VARIABLE}={mark}".encode()
    return [pid for pid in descendants(root) if (session and _session(pid) == session) or sign in environment(pid)]


@dataclass(frozen=True, slots=True)
class Stray:
    """Process that has dropped the mark of its ancestor."""

    tree: list[int]  # the process and its descendants
    born_at: int  # as returned by born_at()


def strays(root: int, known: Collection[int], marks: Collection[str]) -> list[Stray]:
    """Return the children of `root` that it has not started itself (`known`) and that have none of its `marks`."""
    signs = [f"{MARK_VARIABLE}={mark}".encode() for mark in marks]
    children = [pid for pid, parent in _parents() if parent == root and pid not in known and not _is_zombie(pid)]
    found = [pid for pid in children if not any(sign in environment(pid) for sign in signs)]
    return [Stray([pid, *descendants(pid)], born_at(pid)) for pid in found]


def environment(pid: int) -> bytes:
    """Return the environment with which a process was started, in the format of /proc/PID/environ.

    It is empty if the process has ended, belongs to another user, or was started without one. Within an exec a process
    has neither an environment nor a command line, so the read is repeated.
    """
    for _ in range(EXEC_LOOKS):
        if (found := _read(pid, "environ")) or not _has_memory(pid):
            return found
        if _read(pid, "cmdline"):
            return _read(pid, "environ")  # the exec may have ended between the two reads above
        time.sleep(0.001)
    return b""


def born_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return _stat(pid)[:1] == ["T"]


def pass_on(root: int, number: int) -> bool:
    """Send a signal to `root` if it handles it, else to its nearest descendants that do. Return whether any does.

    A process without a handler would end. Forked processes inherit the handlers, so the search stops at a rank and does
    not reach its data loaders.
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
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a process that has changed its user
            os.kill(pid, signal.SIGKILL)


def _children() -> Mapping[int, list[int]]:
    """Return the children of all processes, by the pid of the parent."""
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


def _has_memory(pid: int) -> bool:
    """Return whether the process is neither a zombie nor a kernel thread, which have no environment."""
    fields = _stat(pid)
    return bool(fields) and int(fields[20]) > 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or an empty list if the process has ended."""
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
    """Return a file of /proc/PID, empty if the process has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
