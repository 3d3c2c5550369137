"""Child processes that exit with their parent, even if the parent is killed, and inspection of other processes."""

import asyncio
import contextlib
import ctypes
import functools
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent(parent_pid: int, number: int = signal.SIGTERM) -> None:
    """Make the kernel send signal `number` to this process when the thread that started it exits.

    If its parent is no longer the process `parent_pid`, exit immediately.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.cache
def host_id() -> str:
    """Return an id for this boot and pid namespace. Processes with the same id can refer to each other by pid."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 if it does not exist.

    Together with the pid, this identifies a process even if the pid is reused.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def ended_process(pid: int, started: int, on_end: Callable[[], None]) -> Generator[None, None, None]:
    """Call `on_end` on the running loop if a process exits during the `with` block.

    This is faster than waiting for its connections to close, since forked children may keep the sockets open.
    `started` is the result of started_at(). Do nothing if the process has already exited.
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
    """Open a pidfd of a process for the `with` block.

    Yield None if no process has this pid and the start time `started` (a result of started_at()).
    """
    try:
        descriptor = os.pidfd_open(pid) if pid > 0 else None
    except (OSError, OverflowError, AttributeError):
        descriptor = None
    try:
        yield descriptor if started_at(pid) == started else None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def command_lines() -> Generator[list[str], None, None]:
    """Yield the command line of every process that this user can see."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has exited
            yield Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def describe_listener(port: int) -> str:
    """Describe the process that listens on a TCP port of this host, or how to find it if this user cannot see it."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    for pid in os.listdir("/proc"):
        if pid.isdigit() and inodes & _sockets(pid):
            with contextlib.suppress(OSError):  # the process has exited
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"process {pid} ({words.strip()[:120]})"
    return f"a process that this user cannot see: `ss -tanp sport = :{port}` as root names it"


def _listening(table: str, port: int) -> Generator[str, None, None]:
    """Yield the sockets that listen (state 0A) on the port as "socket:[INODE]", the form that /proc/PID/fd uses.

    `table` is "tcp" or "tcp6".
    """
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


# Daemons as child processes, with the interface of an in-process server.
#
# The kernel kills the child when the thread that started it exits, but a server may outlive the thread that created it.
# So a separate thread starts the child and waits for its exit.

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class ServerProcess:
    """A daemon that runs as a child of this process until its last reference is dropped.

    `announced` is the line that the daemon wrote when it was ready.
    """

    def __init__(
        self,
        serve: str,
        options: Mapping[str, str],
        on_end: Callable[[int], None] | None = None,
        *,
        name: str = "the server",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the daemon and wait until it serves.

        Args:
            serve: Python source that runs the console command, such as START_MANAGER.
            options: Options of the console command's subcommand `serve`, such as {"--bind": ":0"}.
            on_end: Called with the exit status if the child exits before stop() is called.
            name: Name of the daemon in errors.
            variables: Extra environment variables, for values that must not appear in a command line.

        Raises:
            RuntimeError: The daemon did not start. Its output contains the reason.
        """
        started: Future[tuple[subprocess.Popen[bytes], str]] = Future()
        is_stopping = threading.Event()

        def run() -> None:  # must not refer to `self`, which could then never be dropped
            try:
                process, announced = _start(serve, options, name, variables or {})
            except Exception as e:  # noqa: BLE001  raised by `started.result()`
                started.set_exception(RuntimeError(str(e)))
                return
            started.set_result((process, announced))
            status = process.wait()
            if on_end is not None and not is_stopping.is_set():
                on_end(status)

        threading.Thread(target=run, name="lighthouse server", daemon=True).start()
        self._process, self.announced = started.result()
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _stop, self._process, is_stopping, os.getpid())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop the daemon and wait for its exit. Further calls do nothing."""
        self._finalizer()


def _start(
    serve: str, options: Mapping[str, str], name: str, variables: Mapping[str, str]
) -> "tuple[subprocess.Popen[bytes], str]":
    receiving, sending = os.pipe()
    given = {**options, "--announce-fd": str(sending), "--parent-pid": str(os.getpid())}
    # -P: the working directory may contain another `manager` or `lighthouse` package.
    command = [sys.executable, "-P", "-c", serve, "serve", *itertools.chain.from_iterable(given.items())]
    try:
        process = subprocess.Popen(
            command,
            pass_fds=(sending,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun signals its rank's process group; the rank still needs the daemon
            env={**os.environ, **variables},
        )
    except OSError:
        os.close(receiving)
        raise
    finally:
        os.close(sending)
    with open(receiving, closefd=True) as pipe:
        poll = select.poll()  # select() fails on descriptors above 1023
        poll.register(pipe, select.POLLIN)
        line = pipe.readline().strip() if poll.poll(START_TIMEOUT_S * 1000) else ""
    if line:
        return process, line
    process.kill()
    raise RuntimeError(f"{name} did not start (status {process.wait()}); see its messages above")


def _stop(process: "subprocess.Popen[bytes]", is_stopping: threading.Event, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child of the owner must not stop it
        return
    is_stopping.set()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
