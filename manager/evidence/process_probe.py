"""What a rank's process is doing, seen from outside on its host: its stacks by a signal, the rest by /proc.

That blocks, and /proc may hang over a sick process: so each look has a thread of its own, and its time.
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

# -- proc status --------------------------------------------------------------
#
# What /proc says of a process and its threads, for a person to read. Reading it blocks.

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
    """`wchan`: the kernel's function that it waits in; empty: none, or not to be seen by this user."""

    tid: int
    name: str
    state: str
    utime_s: float
    stime_s: float
    wchan: str = ""

    def __str__(self) -> str:
        waits = f", wchan {self.wchan}" if self.wchan else ""
        return f"{shown(self.state)}{waits}, utime {self.utime_s:.1f} s, stime {self.stime_s:.1f} s"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """`caught`: a bit for each signal that it has a handler for, number 1 lowest. `rss_kib`: None where it has no
    memory any more."""

    pid: int
    state: str
    caught: int
    rss_kib: int | None
    threads: tuple[ThreadState, ...]

    @property
    def is_stopped(self) -> bool:
        return self.state in STOPPED

    def handles(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)

    def __str__(self) -> str:
        main, others = self.threads[0], self.threads[1:]
        rss = "no memory" if self.rss_kib is None else f"VmRSS {self.rss_kib / 1024:.1f} MiB"
        head = f"pid {self.pid} ({main.name}): {shown(self.state)}, {rss}, threads: {len(self.threads)}"
        return "\n".join([head, f"main thread: {main}", *_lines(others)])


def shown(state: str) -> str:
    return f"{state} ({_MEANING.get(state, 'unknown')})"


def _lines(threads: Sequence[ThreadState]) -> Iterable[str]:
    """One for all that have the same name, state and place in the kernel."""
    alike: dict[tuple[str, str, str], list[ThreadState]] = {}
    for thread in threads:
        alike.setdefault((thread.name, thread.state, thread.wchan), []).append(thread)
    for (name, state, wchan), some in alike.items():
        ids = ", ".join(str(thread.tid) for thread in some[:_NAMED]) + (", ..." if len(some) > _NAMED else "")
        times = sum(thread.utime_s for thread in some), sum(thread.stime_s for thread in some)
        word = "thread" if len(some) == 1 else f"{len(some)} threads"
        yield f"{word} {name} ({ids}): {ThreadState(0, name, state, *times, wchan)}"


# -- reading


def read_process(pid: int) -> ProcessState:
    """Raises OSError for a process that is gone, or cannot be seen."""
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text(errors="replace")
    rss = _field(status, "VmRSS")
    main = read_thread(folder)
    others = (read for tid in _tids(folder) if tid != pid and (read := _thread_or_none(folder / f"task/{tid}")))
    return ProcessState(
        pid, main.state, int(_field(status, "SigCgt") or "0", 16), int(rss) if rss else None, (main, *others)
    )


def read_thread(folder: Path) -> ThreadState:
    """Of /proc/PID, or of /proc/PID/task/TID. Raises OSError."""
    number, _, rest = (folder / "stat").read_text(errors="replace").partition(" (")
    name, _, rest = rest.rpartition(") ")
    fields = rest.split()
    utime_s, stime_s = (int(ticks) / _TICKS for ticks in fields[11:13])
    return ThreadState(int(number), name, fields[0], utime_s, stime_s, _wchan(folder))


def _thread_or_none(folder: Path) -> ThreadState | None:
    try:
        return read_thread(folder)
    except OSError:  # it has ended
        return None


def _tids(folder: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(folder / "task"))


def _wchan(folder: Path) -> str:
    try:
        wchan = (folder / "wchan").read_text()
    except OSError:
        return ""
    return "" if wchan == "0" else wchan


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\w+)", status, re.MULTILINE)
    return found[1] if found else ""


# -- python stacks ------------------------------------------------------------
#
# The Python stacks of a process of this host, also while it runs no Python: a signal has them written to a file of
# it.
#
# The signal would end a process that has no handler for it. So it is sent by a descriptor of the process, never by
# its pid, and only while the kernel shows a handler and the file is the one that was offered. It blocks.

_FILE = f"/memfd:{STACKS_FILE}"
_POLL_S = 0.01
# They come in many small writes, and a busy host may hold those up.
_REST_S = 0.2
_MOST_BYTES = 1 << 20


class NoStacksError(Exception):
    """Says why."""


def take_stacks(descriptor: int, state: ProcessState, offer: EvidenceOffer, within_s: float) -> str:
    """`descriptor` is a pidfd. Raises NoStacksError."""
    if not offer.signal:
        raise NoStacksError("it has no handler that writes them")
    if state.is_stopped:
        raise NoStacksError("it is stopped, and runs no handler")
    if not state.handles(offer.signal):
        raise NoStacksError(f"it has no handler for signal {offer.signal} any more, and would end by it")
    try:
        with _opened(state.pid, offer.descriptor) as file:
            os.ftruncate(file, 0)  # of an earlier time
            signal.pidfd_send_signal(descriptor, offer.signal)
            return _written(file, time.monotonic() + within_s, within_s)
    except OSError as e:
        raise NoStacksError(f"of process {state.pid}: {e}") from e


@contextlib.contextmanager
def _opened(pid: int, number: int) -> Generator[int, None, None]:
    """A descriptor that a script has closed may be another file by now."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(_FILE):
        raise NoStacksError("it has closed the file for them")
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _written(file: int, ends_at: float, within_s: float) -> str:
    """All that is there once nothing is added any more."""
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
LOOK_WITHIN_S = 2.5  # with what /proc costs on a busy host
OUTPUT_WITHIN_S = 2.0

ELSEWHERE = "process: it is on another host, or in another pid namespace, than its manager"
NO_OUTPUT = "output: only `lighthouse-manager run` keeps it"

ProbeProcess = Callable[[WatchHello, bool], Coroutine[Any, Any, ProcessSnapshot]]
"""What a rank says of its process, and whether that is on this host."""


async def look_alone(request: WatchHello, is_here: bool) -> ProcessSnapshot:
    """Without a supervisor."""
    outside = await look(request) if is_here else ProcessSnapshot(missing=(ELSEWHERE,))
    return replace(outside, missing=(*outside.missing, NO_OUTPUT))


async def look_with_output(request: WatchHello, lines: Awaitable[tuple[str, ...] | None]) -> ProcessSnapshot:
    """`lines`: what the rank wrote last; None: its process is none of this supervisor's."""
    async with asyncio.TaskGroup() as both:
        seeing = both.create_task(look(request))
        reading = both.create_task(_last(lines))
    outside, (output, missing) = seeing.result(), reading.result()
    return replace(outside, output=output, missing=(*outside.missing, *missing))


async def look(request: WatchHello) -> ProcessSnapshot:
    """At a process of this host."""
    offer = request.offer or EvidenceOffer()
    try:
        return await _in_thread(lambda: _look(request.pid, request.started, offer), LOOK_WITHIN_S)
    except TimeoutError:
        late = f"/proc has not answered within {LOOK_WITHIN_S:g} s"
        return ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


def _look(pid: int, started: int, offer: EvidenceOffer) -> ProcessSnapshot:
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
    """The lines, and why there are none."""
    try:
        async with asyncio.timeout(OUTPUT_WITHIN_S):
            output = await lines
    except TimeoutError:
        return (), (f"output: its keeper has not answered within {OUTPUT_WITHIN_S:g} s",)
    return ((), ("output: its process is none of the supervisor's",)) if output is None else (output, ())


async def _in_thread(work: Callable[[], T], within_s: float) -> T:
    """Raises TimeoutError; the thread then goes on for as long as /proc keeps it, and no end of ours waits for it."""
    done = concurrent.futures.Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as e:  # noqa: BLE001  it belongs to the waiter
            done.set_exception(e)

    threading.Thread(target=run, name="evidence", daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), within_s)
