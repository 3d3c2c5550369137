"""Records the progress of this rank: its step, its open phases, and the current line of the script.

`Progress` records the marks of a script with an Agent: steps, named phases, ticks and declared waits. With a
`TraceFile`, it also writes them to a file. `ScriptProgress` derives the progress of a script without an Agent from the
counts of torch's collectives and the stack of the main thread.

One thread makes marks, and any thread may take samples. A mark appends a time to a queue, which takes a few hundred
nanoseconds and never waits for a lock. Taking a sample processes the queued marks (progress/rules.py). If no sample is
taken for a long time, the marking thread processes the marks itself, which bounds the queue. progress/activity.py
records what the Agent's background thread is doing.
"""

import logging
import operator
import os
import sys
import sysconfig
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TypeAlias

from agent_client.errors import ConfigurationError
from agent_client.progress.activity import (
    Activity,
    ActivityBlock,
    CollectiveBlock,
    Shape,
    TorchCollective,
    format_shape,
)
from agent_client.progress.rules import CollectiveIds, ComputeClock, Name, Number, PhaseTimes
from agent_client.progress.script_groups import STILL_S
from lighthouse_protocol.limits import MAX_COUNT, escaped
from lighthouse_protocol.messages.progress import (
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER,
    STEP,
    ProgressSample,
    StateDigest,
)

log = logging.getLogger(__name__)

MAX_UNREAD = 4096  # maximum number of queued marks
TRACE_VARIABLE = "LIGHTHOUSE_TRACE_DIR"
"""Environment variable with the folder of trace files. If it is not set, no trace is written."""

Block: TypeAlias = "AbstractContextManager[None]"

# A tick (time), a phase that is entered or left (time, phase, whether entered), or a new step (time, number).
_Mark: TypeAlias = "float | tuple[float, Phase, bool] | tuple[float, int]"


class Progress:
    """Records the progress of a rank. The Agent marks steps, phases and waits. The rank's watch reads samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, trace: "TraceFile | None" = None) -> None:
        self.clock = clock
        self.trace = trace
        self.begun = 0
        self.number = 0
        self.marks: deque[_Mark] = deque()
        root = Phase(STEP, progress=self)
        self._phases = {STEP: root}
        self._waits: dict[str, Phase] = {}
        self._times = PhaseTimes(root, clock())
        self._marks_lock = threading.Lock()
        self.activity = Activity(clock)
        self.compute = ComputeClock(clock())
        self.compared: StateDigest | None = None
        """Digest of the newest state that was compared with the peers."""

    # -- marks, on the script's thread

    def step(self, number: int) -> None:
        self.begun, self.number = self.begun + 1, number
        self.marks.append((self.clock(), number))
        self.bound_queue()

    def trace_decision(self, step: int, quorum_id: int, *, is_committed: bool) -> None:
        if self.trace is not None:
            self.trace.write(f"step {step} {'commits' if is_committed else 'is discarded'} under quorum {quorum_id}")

    def trace_state(self, step: int, quorum_id: int, digest: str) -> None:
        if self.trace is not None:
            self.trace.write(f"step {step} has state {digest} under quorum {quorum_id}")

    def tick(self) -> None:
        self.marks.append(self.clock())
        self.bound_queue()

    def phase(self, name: str, total: int | None = None) -> Block:
        """Return a context manager that marks a named phase of the script's work.

        Args:
            name: Name of the phase. Once there are MAX_NAMES names, new ones are combined as OTHER.
            total: Expected number of ticks, or None if unknown.
        """
        if total is not None and not 0 <= operator.index(total) < MAX_COUNT:
            raise ConfigurationError(f"phase {name!r}: total is {total}, not a number of ticks")
        phase = self._phases.get(name) or self._new(name, self._phases, is_wait=False)
        phase.total = total
        return self._traced(name if total is None else f"{name} of {total}", phase)

    def waiting_for(self, what: str) -> Block:
        """Return a context manager that marks a wait for other ranks. A waiting rank is never reported as behind."""
        wait = self._waits.get(what) or self._new(what, self._waits, is_wait=True)
        return self._traced(f"the wait for {what}", wait)

    def _new(self, name: str, known: "dict[str, Phase]", *, is_wait: bool) -> "Phase":
        name = escaped(name)[:MAX_NAME_CHARS]  # a lone surrogate, as in a file name, cannot be sent
        if len(known) >= MAX_NAMES - 1:
            name = OTHER
        if name not in known:
            known[name] = Phase(name, is_wait, progress=self)
        return known[name]

    def bound_queue(self) -> None:
        if len(self.marks) > MAX_UNREAD:
            with self._marks_lock:
                self._process_marks()

    def enter_reduction(self) -> None:
        """Mark that the script is waiting for its last reduction. This affects only the measured compute time."""
        now = self.clock()
        self.compute.enter_reduction(now, self.activity.collectives_s(now))

    def leave_reduction(self) -> None:
        now = self.clock()
        self.compute.leave_reduction(now, self.activity.collectives_s(now))

    # -- marks, on the Agent's own thread

    @property
    def numbers(self) -> CollectiveIds:
        return self.activity.numbers

    def collective(self, number: Number, operation: str, shape: Shape = "", *, within_group: bool = False) -> Block:
        """Return a context manager that marks a collective that the Agent runs. `number` is the same on all ranks.

        `within_group` means that the collective runs between the ranks of one replica group, not between groups.
        """
        inside = CollectiveBlock(self.activity, number, operation, shape, within_group)
        if self.trace is None:
            return inside
        return self._traced(_describe(number, operation, shape, within_group=within_group), inside)

    def enter_torch_collective(self, operation: str, shape: Shape) -> TorchCollective:
        """Mark the start of a collective that a torch module, such as DDP, runs. Its end is not reported or traced."""
        entered = TorchCollective(self.numbers.inside(), operation, shape, self.clock())
        self.activity.add_collective(entered)
        if self.trace is not None:
            number = self.numbers.number_of(entered.entry, within_group=True)
            what = _describe(number, operation, shape, within_group=True)
            self.trace.write(f"step {self.number} enters torch's {what}")
        return entered

    def asking(self, what: str) -> Block:
        """Return a context manager that marks the Agent as waiting for `what`, while the script may compute."""
        return self._traced(f"the wait for {what}", ActivityBlock(self.activity, what, is_wait=True))

    def busy(self, what: str) -> Block:
        """Return a context manager that marks `what`, slow work by the Agent for which the script has to wait."""
        return self._traced(what, ActivityBlock(self.activity, what, is_wait=False))

    def _traced(self, what: str, block: Block) -> Block:
        return block if self.trace is None else TracedBlock(self, self.trace, what, block)

    # -- on any thread

    def sample(self) -> ProgressSample:
        with self._marks_lock:
            self._process_marks()
            sample = self._times.make_sample(self.activity.take_sample(), self.clock())
            return replace(sample, compared=self.compared, computed=self.compute.totals)

    def _process_marks(self) -> None:
        for _ in range(len(self.marks)):
            mark = self.marks.popleft()
            if not isinstance(mark, tuple):
                self._times.add_tick(mark)
            elif len(mark) == 2:
                self._times.add_step(mark[1], mark[0])
            elif mark[2]:
                self._times.enter_phase(mark[1], mark[0])
            else:
                self._times.leave_phase(mark[1], mark[0])


class Phase(Name):
    __slots__ = ("progress",)

    def __init__(self, name: str, is_wait: bool = False, *, progress: Progress) -> None:
        super().__init__(name, is_wait)
        self.progress = progress

    def __enter__(self) -> None:
        progress, now = self.progress, self.progress.clock()
        progress.marks.append((now, self, True))
        if self.is_wait:
            progress.compute.enter_wait(now)

    def __exit__(self, *_: object) -> None:
        progress, now = self.progress, self.progress.clock()
        progress.marks.append((now, self, False))
        if self.is_wait:
            progress.compute.leave_wait(now)
        progress.bound_queue()


class TraceFile:
    """A file that records when this process enters and leaves each phase, wait and collective. Thread-safe.

    It also records whether each step was committed, and digests of the state.

        2026-11-22T07:41:03.118201Z step 812 enters validation
        2026-11-22T07:41:03.120044Z step 812 enters all_reduce 24 of quorum 17, 4096x1024
        2026-11-22T07:41:03.131377Z step 812 leaves all_reduce 24 of quorum 17, 4096x1024 after 0.011 s
        2026-11-22T07:41:03.140210Z step 812 commits under quorum 17

    A rank hangs at the last "enters" that has no matching "leaves". A `diff` of two ranks' files shows where the ranks
    diverge. Lines are not buffered. After the first write error, all later lines are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._has_failed = False

    def write(self, text: str) -> None:
        if self._has_failed:
            return
        line = f"{datetime.now(UTC).isoformat(timespec='microseconds').removesuffix('+00:00')}Z {text}\n"
        try:
            os.write(self._descriptor, line.encode(errors="backslashreplace"))
        except OSError as e:
            # Keep the descriptor open, because another thread may be about to write, and the number could be reused.
            self._has_failed = True
            log.warning("%s: tracing stopped: %s", self._path, e.strerror)


def make_progress(group_rank: int, variables: Mapping[str, str] = os.environ) -> Progress:
    """Create the Progress of a rank, with a trace file if TRACE_VARIABLE names a folder.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    folder = variables.get(TRACE_VARIABLE)
    if not folder:
        return Progress()
    group = urllib.parse.quote(variables.get("REPLICA_GROUP_ID") or "group", safe="@+=")
    path = Path(folder) / f"{group}-rank-{group_rank}-{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Progress(trace=TraceFile(_create(path)))
    except OSError as e:
        raise ConfigurationError(f"{TRACE_VARIABLE}={folder}: {path} cannot be written: {e.strerror}") from None


def _create(path: Path) -> Path:
    """Create a file. If `path` exists, add a number to its name: in containers, processes often have the same pid."""
    created, number = path, 1
    while True:
        try:
            created.touch(0o644, exist_ok=False)
            return created
        except FileExistsError:
            number += 1
            created = path.with_name(f"{path.stem}-{number}{path.suffix}")


def _describe(number: Number, operation: str, shape: Shape, *, within_group: bool) -> str:
    nth = f"{number.number}.{number.inner}" if number.inner else str(number.number)
    where = " in the group" if within_group else ""
    return f"{operation} {nth} of quorum {number.quorum_id}{where}, {format_shape(shape)}"


class TracedBlock:
    def __init__(self, progress: Progress, trace: TraceFile, what: str, block: Block) -> None:
        self._progress, self._trace, self._what, self._block = progress, trace, what, block
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self._progress.clock()
        self._trace.write(f"step {self._progress.number} enters {self._what}")
        self._block.__enter__()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._block.__exit__(kind, e, at)
        how = f", by {kind.__name__}" if kind is not None else ""
        took_s = self._progress.clock() - self._since
        self._trace.write(f"step {self._progress.number} leaves {self._what} after {took_s:.3f} s{how}")


FIRST_COLLECTIVES = 32
"""Number of collectives that count as the first step, which includes compilation and warm-up."""
MAX_FRAMES = 100
_OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<"})
_OURS = ("agent_client.", "sitecustomize")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")

Line = tuple[CodeType, int]


class ScriptProgress:
    """Progress of a script without an Agent. Use it from one thread.

    Steps cannot be observed, so the first FIRST_COLLECTIVES collectives count as the first step. New collectives since
    the last sample count as progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress(clock)
        self._progress.step(0)
        self._groups = self._progress.activity.script_groups
        self._moved_at = self._groups.moved_at
        self._is_first = True
        self._place = ScriptPlace()

    def sample(self) -> ProgressSample:
        """Return a sample with a single phase, whose `done` is the total number of collectives."""
        sample, done = self._progress.sample(), self._groups.total
        if self._moved_at != self._groups.moved_at:
            self._moved_at = self._groups.moved_at
            self._progress.tick()
        if self._is_first and done >= FIRST_COLLECTIVES:
            self._is_first = False
            self._progress.step(0)
        at, call = self._place.locate(_main_frame(), self._clock(), sample.still_s)
        is_held = sample.still_s >= STILL_S and not sample.is_inside
        phases = (replace(sample.innermost, done=done),)
        return replace(sample, phases=phases, at=at or "?", waits_for=call if is_held else "")


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


class ScriptPlace:
    """Finds the line at which the script is stuck.

    This is the innermost line that has been on the main thread's stack for at least half of the time without progress.
    In an endless loop, it is the line that called the function with the loop.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[Line, float]] = []  # outermost first, each with the time when it was first on the stack

    def locate(self, frame: FrameType | None, now: float, still_s: float) -> tuple[str, str]:
        """Return the line, and the function of torch.distributed that it called. Either may be an empty string.

        `frame` is the innermost frame of the main thread at `now`, after `still_s` seconds without progress.
        """
        lines, call = _read(frame)
        same = list(takewhile(lambda pair: pair[0][0] == pair[1], zip(self._lines, lines, strict=False)))
        self._lines = [before for before, _ in same] + [(line, now) for line in lines[len(same) :]]
        if not self._lines:
            return "", call
        stays = [line for line, since in self._lines if now - since >= still_s / 2] or [lines[0]]
        return _shown(*(lines if still_s < STILL_S else stays)[-1]), call


def _read(frame: FrameType | None) -> tuple[list[Line], str]:
    """Return the script's lines on the stack, outermost first, and the torch.distributed function that they call."""
    lines: list[Line] = []
    call = ""
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES):
            call = code.co_name[:MAX_NAME_CHARS]
        elif not code.co_filename.startswith(_OTHERS) and not str(frame.f_globals.get("__name__")).startswith(_OURS):
            lines.append((code, frame.f_lineno))
        frame = frame.f_back
    return lines[::-1], call


def _shown(code: CodeType, line: int) -> str:
    place = f"{os.path.basename(code.co_filename)}:{line}"
    return escaped(place if code.co_name == "<module>" else f"{code.co_name} ({place})")[:MAX_LABEL_CHARS]
