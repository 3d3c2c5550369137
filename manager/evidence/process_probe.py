"""Inspects a rank's process from outside: reads its state from /proc, and gets its Python stacks by a signal.

Both operations block, and reading /proc can hang if the process is stuck in the kernel. Therefore each inspection runs
in its own thread with a time limit.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lighthouse_protocol.messages.incident import STACKS_FILE, ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_runtime.process.children import process_descriptor

# -- process state, from /proc

STOPPED = "Tt"
_MEANING = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "ended, not reaped",
    "X": "ended",
    "I": "idle",
}
_TICKS = os.sysconf("SC_CLK_TCK")
_NAMED = 4


@dataclass(frozen=True, slots=True)
class ThreadState:
    """State of a thread."""

    tid: int
    name: str
    state: str
    utime_s: float
    stime_s: float
    wchan: str = ""  # kernel function in which the thread is waiting; empty if none, or if hidden from this user

    def __str__(self) -> str:
        waits = f", wchan {self.wchan}" if self.wchan else ""
        return f"{_describe_state(self.state)}{waits}, utime {self.utime_s:.1f} s, stime {self.stime_s:.1f} s"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a process and its threads."""

    pid: int
    state: str
    caught: int  # bitmask of the signals that have a handler; bit 0 is signal 1
    rss_kib: int | None  # resident memory in KiB, or None for a zombie
    threads: tuple[ThreadState, ...]

    @property
    def is_stopped(self) -> bool:
        return self.state in STOPPED

    def handles(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)

    def __str__(self) -> str:
        main, others = self.threads[0], self.threads[1:]
        rss = "no memory" if self.rss_kib is None else f"VmRSS {self.rss_kib / 1024:.1f} MiB"
        head = f"pid {self.pid} ({main.name}): {_describe_state(self.state)}, {rss}, threads: {len(self.threads)}"
        return "\n".join([head, f"main thread: {main}", *_lines(others)])


def _describe_state(state: str) -> str:
    return f"{state} ({_MEANING.get(state, 'unknown')})"


def _lines(threads: Sequence[ThreadState]) -> Iterable[str]:
    """Return one line for each group of threads with the same name, state and kernel function."""
    alike: dict[tuple[str, str, str], list[ThreadState]] = {}
    for thread in threads:
        alike.setdefault((thread.name, thread.state, thread.wchan), []).append(thread)
    for (name, state, wchan), some in alike.items():
        ids = ", ".join(str(thread.tid) for thread in some[:_NAMED]) + (", ..." if len(some) > _NAMED else "")
        times = sum(thread.utime_s for thread in some), sum(thread.stime_s for thread in some)
        word = "thread" if len(some) == 1 else f"{len(some)} threads"
        yield f"{word} {name} ({ids}): {ThreadState(0, name, state, *times, wchan)}"


def read_process(pid: int) -> ProcessState:
    """Read the state of a process.

    Raises:
        OSError: If the process has ended or is not visible.
    """
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text(errors="replace")
    rss = _field(status, "VmRSS")
    threads = [read_thread(folder)]
    for tid in sorted(map(int, os.listdir(folder / "task"))):
        if tid != pid:
            with contextlib.suppress(OSError):  # the thread has ended
                threads.append(read_thread(folder / f"task/{tid}"))
    caught = int(_field(status, "SigCgt") or "0", 16)
    return ProcessState(pid, threads[0].state, caught, int(rss) if rss else None, tuple(threads))


def read_thread(folder: Path) -> ThreadState:
    """Read the state of a thread from /proc/PID or /proc/PID/task/TID.

    Raises:
        OSError: If the thread has ended or is not visible.
    """
    number, _, rest = (folder / "stat").read_text(errors="replace").partition(" (")
    name, _, rest = rest.rpartition(") ")
    fields = rest.split()
    utime_s, stime_s = (int(ticks) / _TICKS for ticks in fields[11:13])
    return ThreadState(int(number), name, fields[0], utime_s, stime_s, _wchan(folder))


def _wchan(folder: Path) -> str:
    try:
        wchan = (folder / "wchan").read_text()
    except OSError:
        return ""
    return "" if wchan == "0" else wchan


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\w+)", status, re.MULTILINE)
    return found[1] if found else ""


# -- Python stacks
#
# A signal makes the process write its stacks to a memfd, even while it cannot run Python. The signal would kill a
# process that has no handler for it. So it is sent through a pidfd, never by pid, and only if the kernel reports a
# handler and the process still has the memfd open that it offered.

_FILE = f"/memfd:{STACKS_FILE}"
_POLL_S = 0.01
# The handler makes many small writes, and a busy host may delay them.
_REST_S = 0.2
_MOST_BYTES = 1 << 20


class NoStacksError(Exception):
    """The stacks are not available. The message is the reason."""


def take_stacks(descriptor: int, state: ProcessState, offer: EvidenceOffer, within_s: float) -> str:
    """Make a process write its stacks, and return them. Blocks for at most `within_s` seconds.

    Args:
        descriptor: A pidfd of the process.
        state: The state of the process.
        offer: The signal to send, and the file to which the process's handler writes.
        within_s: Time limit in seconds.

    Raises:
        NoStacksError: If the stacks are not available.
    """
    if not offer.signal:
        raise NoStacksError("it has no handler that writes them")
    if state.is_stopped:
        raise NoStacksError("it is stopped, and runs no handler")
    if not state.handles(offer.signal):
        raise NoStacksError(f"it has no handler for signal {offer.signal} any more, and would end by it")
    try:
        with _opened(state.pid, offer.descriptor) as file:
            os.ftruncate(file, 0)  # discard earlier stacks
            signal.pidfd_send_signal(descriptor, offer.signal)
            return _written(file, time.monotonic() + within_s, within_s)
    except OSError as e:
        raise NoStacksError(f"of process {state.pid}: {e}") from e


@contextlib.contextmanager
def _opened(pid: int, number: int) -> Generator[int, None, None]:
    """Open the file of stacks. Check that it is still the same, because a script may have reused the descriptor."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(_FILE):
        raise NoStacksError("it has closed the file for them")
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _written(file: int, ends_at: float, within_s: float) -> str:
    """Wait until the file of stacks has stopped growing, and return its content."""
    size, rests_at = 0, ends_at
    while (now := time.monotonic()) < min(ends_at, rests_at):
        if (grown := os.fstat(file).st_size) > size:
            size, rests_at = grown, now + _REST_S
        time.sleep(_POLL_S)
    if not size:
        raise NoStacksError(f"its handler has written nothing within {within_s:g} s")
    return os.pread(file, min(size, _MOST_BYTES), 0).decode(errors="replace")


T = TypeVar("T")

STACKS_WITHIN_S = 2.0
PROBE_TIMEOUT_S = 2.5  # including slow reads of /proc on a busy host
OUTPUT_WITHIN_S = 2.0

ELSEWHERE = "process: it is on another host, or in another pid namespace, than its manager"
NO_OUTPUT = "output: only `lighthouse-manager run` keeps it"

# Arguments: the rank's hello, which describes its process, and whether the process runs on this host.
ProbeProcess = Callable[[WatchHello, bool], Coroutine[Any, Any, ProcessSnapshot]]


async def probe_alone(request: WatchHello, is_here: bool) -> ProcessSnapshot:
    """Inspect a process that no supervisor runs. Its output is therefore not available."""
    outside = await probe(request) if is_here else ProcessSnapshot(missing=(ELSEWHERE,))
    return replace(outside, missing=(*outside.missing, NO_OUTPUT))


async def probe_with_output(request: WatchHello, lines: Awaitable[tuple[str, ...] | None]) -> ProcessSnapshot:
    """Inspect a process and add its last output.

    Args:
        request: The rank's hello, which identifies the process.
        lines: Returns the rank's last lines of output, or None if this supervisor does not run the rank.
    """
    async with asyncio.TaskGroup() as both:
        seeing = both.create_task(probe(request))
        reading = both.create_task(_last(lines))
    outside, (output, missing) = seeing.result(), reading.result()
    return replace(outside, output=output, missing=(*outside.missing, *missing))


async def probe(request: WatchHello) -> ProcessSnapshot:
    """Inspect a process on this host."""
    offer = request.offer or EvidenceOffer()
    try:
        return await _in_thread(lambda: _probe(request.pid, request.started, offer), PROBE_TIMEOUT_S)
    except TimeoutError:
        late = f"/proc has not answered within {PROBE_TIMEOUT_S:g} s"
        return ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


def _probe(pid: int, started: int, offer: EvidenceOffer) -> ProcessSnapshot:
    with process_descriptor(pid, started) as descriptor:
        if descriptor is None:
            return ProcessSnapshot(missing=(f"stacks: process {pid} has ended", f"process: {pid} has ended"))
        try:
            state = read_process(pid)
        except OSError as e:
            return ProcessSnapshot(missing=(f"stacks: not without /proc/{pid}", f"process: {e}"))
        try:
            stacks, missing = take_stacks(descriptor, state, offer, STACKS_WITHIN_S), ()
        except NoStacksError as e:
            stacks, missing = "", (f"stacks: {e}",)
    return ProcessSnapshot(stacks, str(state), missing=missing, is_stopped=state.is_stopped)


async def _last(lines: Awaitable[tuple[str, ...] | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rank's last lines, and the reasons if they are missing."""
    try:
        async with asyncio.timeout(OUTPUT_WITHIN_S):
            output = await lines
    except TimeoutError:
        return (), (f"output: its keeper has not answered within {OUTPUT_WITHIN_S:g} s",)
    return ((), ("output: its process is none of the supervisor's",)) if output is None else (output, ())


async def _in_thread(work: Callable[[], T], within_s: float) -> T:
    """Run `work` in a new daemon thread and return its result.

    Raises:
        TimeoutError: If `work` takes longer than `within_s` seconds. The thread is abandoned, and does not delay the
            exit of this process.
    """
    done = concurrent.futures.Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as e:  # noqa: BLE001  re-raised in the caller
            done.set_exception(e)

    threading.Thread(target=run, name="evidence", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), within_s)
