"""The processes that descend from this one, by /proc, and their end.

A process that left its parent, its process group and its session still descends from the next subreaper, and carries
the mark in its environment that its ancestor was started with. A stray has thrown off that, too (`setsid env -i`): it
is known as a child of the subreaper that this one has not started.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "LIGHTHOUSE_TREE"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
EXEC_LOOKS = 100
"""At a process in the middle of an exec, a millisecond apart. A machine that stands still uses up only one."""


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def descendants(root: int) -> list[int]:
    """Those that run; a zombie has ended."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found: list[int] = []
    below = [root]
    while below:
        below = [child for pid in below for child in children.get(pid, ())]
        found += below
    return [pid for pid in found if not _is_zombie(pid)]


def marked(root: int, mark: str, session: int = 0) -> list[int]:
    """The descendants of `root` in that session, or with a mark that begins with `mark`."""
    sign = f"{MARK_VARIABLE}={mark}".encode()
    return [pid for pid in descendants(root) if (session and _session(pid) == session) or sign in environment(pid)]


@dataclass(frozen=True, slots=True)
class Stray:
    """`tree`: it and what descends from it. `born_at` in the clock ticks of born_at()."""

    tree: list[int]
    born_at: int


def strays(root: int, known: Collection[int], marks: Collection[str]) -> list[Stray]:
    """The children of `root` that are not `known`, and carry none of these marks. All of `known` are its children."""
    signs = [f"{MARK_VARIABLE}={mark}".encode() for mark in marks]
    children = [pid for pid, parent in _parents() if parent == root and pid not in known and not _is_zombie(pid)]
    found = [pid for pid in children if not any(sign in environment(pid) for sign in signs)]
    return [Stray([pid, *descendants(pid)], born_at(pid)) for pid in found]


def environment(pid: int) -> bytes:
    """As the process was started; empty where it has gone, is another user's, or was started without any.

    In the middle of an exec a process has neither this nor a command line: it is looked at again until it has.
    """
    for _ in range(EXEC_LOOKS):
        if (found := _read(pid, "environ")) or not _has_memory(pid):
            return found
        if _read(pid, "cmdline"):
            return _read(pid, "environ")  # the exec may have ended between the first two looks
        time.sleep(0.001)
    return b""


def born_at(pid: int) -> int:
    """In clock ticks since the host has started; 0 where the process has gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_stopped(pid: int) -> bool:
    """By a signal."""
    return _stat(pid)[:1] == ["T"]


def pass_on(root: int, number: int) -> bool:
    """Send a signal to `root` if it handles it, else to the nearest processes below it that do; whether any does.

    What a process forks has its handlers: a rank's data loaders are not reached. A process without a handler would end.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # one that has become another user's stays
            os.kill(pid, signal.SIGKILL)


def _parents() -> Iterator[tuple[int, int]]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        fields = _stat(pid)
        if fields:
            yield pid, int(fields[1])


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def _has_memory(pid: int) -> bool:
    """Neither a zombie nor one of the kernel's threads: these have no environment."""
    fields = _stat(pid)
    return bool(fields) and int(fields[20]) > 0


def _stat(pid: int) -> list[str]:
    """From the state on; nothing where the process has gone."""
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
    """Nothing where the process has gone, or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
