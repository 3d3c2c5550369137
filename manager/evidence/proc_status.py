"""What /proc says of a process and its threads, for a person to read. Reading it blocks."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
