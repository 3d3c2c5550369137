"""Processes: a child that ends with its parent, even with one that is killed; to see another one's end."""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: int = signal.SIGTERM) -> None:
    """Get signal `number` when the thread that started this process ends. Exits if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.cache
def host_id() -> str:
    """The machine's present start and the pid namespace: where this is the same, pids mean the same."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since the boot: with its pid, that names it. 0: it is not there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def ended_process(pid: int, started: int, on_end: Callable[[], None]) -> Generator[None, None, None]:
    """Inside, `on_end` is called on the running loop when that process ends.

    Its sockets may stay open for longer, in children that it forked. A pid that names another process by now, or none,
    is not watched: the stream that told it will end by itself.
    """
    with process_descriptor(pid, started) as descriptor:
        if descriptor is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            on_end()

        loop.add_reader(descriptor, ended)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)


@contextlib.contextmanager
def process_descriptor(pid: int, started: int) -> Generator[int | None, None, None]:
    """A pidfd of that process; None where its pid names another process by now, or none."""
    descriptor = _pidfd(pid, started)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def command_lines() -> Generator[list[str], None, None]:
    """Of all processes that this user can see."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            yield Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def who_listens(port: int) -> str:
    """Which process of this host listens on that TCP port, for people: what /proc shows to this user."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    for pid in os.listdir("/proc"):
        if pid.isdigit() and inodes & _sockets(pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {pid} ({words.strip()[:120]})"
    return f"a process that this user cannot see: `ss -ltnp sport = :{port}` as root names it"


def _listening(table: str, port: int) -> Generator[str, None, None]:
    """The inodes of the sockets that listen there (state 0A)."""
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return
    for fields in map(str.split, lines):
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            yield f"socket:[{fields[9]}]"


def _sockets(pid: str) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):  # another user's process, or one that has ended
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def _pidfd(pid: int, started: int) -> int | None:
    try:
        descriptor = os.pidfd_open(pid) if pid > 0 else None
    except (OSError, AttributeError):
        return None
    if descriptor is None:
        return None
    if started_at(pid) == started:
        return descriptor
    os.close(descriptor)
    return None
