"""Records the progress of this rank: its step, its open phases, and the current line of the script.

`Progress` records the marks that a script with an Agent makes: steps, named phases, ticks and declared waits.
`ScriptProgress` derives progress without an Agent, from the counts of torch's collectives and the stack of the main
thread.

One thread makes marks, and any thread may take samples. A mark appends a time to a queue, which takes a few hundred
nanoseconds and never waits for a lock. Taking a sample processes the queued marks (progress/rules.py). If no sample is
taken for a long time, the marking thread processes the marks itself, which bounds the queue. progress/activity.py
records what the Agent's background thread is doing.
"""

import os
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from types import CodeType, FrameType, TracebackType
from typing import TypeAlias

from agent_client.progress.activity import Activity, ActivityBlock, Inside, Shape, TorchCollective
from agent_client.progress.rules import CollectiveIds, Name, Number, PhaseTimes
from agent_client.progress.script_groups import STILL_S
from lighthouse_protocol.messages.progress import (
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER,
    STEP,
    ProgressSample,
)

MAX_UNREAD = 4096  # maximum number of queued marks

Block: TypeAlias = "AbstractContextManager[None]"

# A tick; a phase that is entered (True) or left (False); the number of a step that begins.
_Mark: TypeAlias = "float | tuple[float, Phase, bool] | tuple[float, int]"


class Progress:
    """Records the progress of a rank. The Agent makes the marks, and the rank's watch takes the samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.begun = 0
        self.number = 0
        self.marks: deque[_Mark] = deque()
        root = Phase(STEP, progress=self)
        self._phases = {STEP: root}
        self._waits: dict[str, Phase] = {}
        self._times = PhaseTimes(root, clock())
        self._reckoning = threading.Lock()
        self.own = Activity(clock)

    # -- marks, on the script's thread

    def step(self, number: int) -> None:
        self.begun, self.number = self.begun + 1, number
        self.marks.append((self.clock(), number))
        self.bound()

    def decided(self, step: int, quorum_id: int, *, is_committed: bool) -> None:
        """Record that a step was committed or discarded. Does nothing here; traces override it."""

    def has_state(self, step: int, quorum_id: int, digest: str) -> None:
        """Record the digest of the state before a step. Does nothing here; traces override it."""

    def tick(self) -> None:
        marks = self.marks
        marks.append(self.clock())
        if len(marks) > MAX_UNREAD:
            self.bound()

    def phase(self, name: str, total: int | None = None) -> Block:
        """Return a context manager that marks a named phase of the script's work.

        Args:
            name: Name of the phase. Above MAX_NAMES names, further ones are combined as OTHER.
            total: Expected number of ticks, or None if unknown.
        """
        try:
            phase = self._phases[name]
        except KeyError:
            phase = self._new(name, self._phases, is_wait=False)
        phase.total = total
        return phase

    def waiting_for(self, what: str) -> Block:
        """Return a context manager that marks a wait for other ranks.

        During the wait, this rank is never reported as behind.
        """
        return self._waits.get(what) or self._new(what, self._waits, is_wait=True)

    def _new(self, name: str, known: "dict[str, Phase]", *, is_wait: bool) -> "Phase":
        name = name[:MAX_NAME_CHARS]
        if len(known) >= MAX_NAMES - 1:
            name = OTHER
        if name not in known:
            known[name] = Phase(name, is_wait, progress=self)
        return known[name]

    def bound(self) -> None:
        if len(self.marks) > MAX_UNREAD:
            with self._reckoning:
                self._reckon()

    # -- marks, on the Agent's own thread

    @property
    def numbers(self) -> CollectiveIds:
        return self.own.numbers

    def collective(
        self,
        quorum_id: int,
        number: int,
        operation: str,
        shape: Shape = "",
        *,
        within_group: bool = False,
        inner: int = 0,
    ) -> Block:
        """Return a context manager that marks a collective of the Agent."""
        return Inside(self.own, Number(quorum_id, number, inner), operation, shape, within_group)

    def torchs(self, operation: str, shape: Shape) -> TorchCollective:
        entered = TorchCollective(self.numbers.inside(), operation, shape, self.clock())
        self.own.enter(entered)
        return entered

    def asking(self, what: str) -> Block:
        """Return a context manager that marks a wait of the Agent for `what`. The script may be computing meanwhile."""
        return ActivityBlock(self.own, what, is_wait=True)

    def busy(self, what: str) -> Block:
        """Return a context manager that marks slow work of the Agent, for which the script will have to wait."""
        return ActivityBlock(self.own, what, is_wait=False)

    # -- on any thread

    def sample(self) -> ProgressSample:
        with self._reckoning:
            self._reckon()
            return self._times.sample(self.own.read(), self.clock())

    def _reckon(self) -> None:
        for _ in range(len(self.marks)):
            mark = self.marks.popleft()
            if not isinstance(mark, tuple):
                self._times.tick(mark)
            elif len(mark) == 2:
                self._times.step(mark[1], mark[0])
            elif mark[2]:
                self._times.enter(mark[1], mark[0])
            else:
                self._times.leave(mark[1], mark[0])


class Phase(Name):
    __slots__ = ("progress",)

    def __init__(self, name: str, is_wait: bool = False, *, progress: Progress) -> None:
        super().__init__(name, is_wait)
        self.progress = progress

    def __enter__(self) -> None:
        progress = self.progress
        progress.marks.append((progress.clock(), self, True))

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        progress = self.progress
        marks = progress.marks
        marks.append((progress.clock(), self, False))
        if len(marks) > MAX_UNREAD:
            progress.bound()


FIRST_COLLECTIVES = 32
"""Number of collectives that count as the first step, in which compilation and warm-up happen."""
MAX_FRAMES = 100
_OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<"})
_OURS = ("agent_client.", "sitecustomize")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")

Line = tuple[CodeType, int]


class ScriptProgress:
    """Progress of a script without an Agent. Use it from one thread.

    Steps cannot be observed, so the first FIRST_COLLECTIVES collectives count as the first step. A sample that finds
    new collectives marks a tick.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress(clock)
        self._progress.step(0)
        self._groups = self._progress.own.script_groups
        self._moved_at = self._groups.moved_at
        self._is_first = True
        self._place = ScriptPlace()

    def sample(self) -> ProgressSample:
        """Return a sample. The `done` of its phase is the number of collectives so far."""
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
    For an endless loop, it is the line that called the function with the loop.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[Line, float]] = []  # outermost first, each with the time since which it is on the stack

    def locate(self, frame: FrameType | None, now: float, still_s: float) -> tuple[str, str]:
        """Return the line, and the function of torch.distributed that it called. Either may be an empty string.

        `frame` is the innermost frame of the main thread at `now`, after `still_s` without progress.
        """
        lines, call = _read(frame)
        same = list(takewhile(lambda pair: pair[0][0] == pair[1], zip(self._lines, lines, strict=False)))
        self._lines = [before for before, _ in same] + [(line, now) for line in lines[len(same) :]]
        if not self._lines:
            return "", call
        stays = [line for line, since in self._lines if now - since >= still_s / 2] or [lines[0]]
        return _shown(*(lines if still_s < STILL_S else stays)[-1]), call


def _read(frame: FrameType | None) -> tuple[list[Line], str]:
    """Return the script's own lines on the stack, outermost first, and the function of torch.distributed called."""
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
    return (place if code.co_name == "<module>" else f"{code.co_name} ({place})")[:MAX_LABEL_CHARS]
