"""Where a script without an Agent is: its collectives, and the line that it is at. Seen from a thread beside it."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from types import CodeType, FrameType

from agent_client.progress.progress import Progress
from agent_client.progress.script_groups import STILL_S
from lighthouse_protocol.messages.progress import MAX_LABEL_CHARS, MAX_NAME_CHARS, ProgressSample

FIRST_COLLECTIVES = 32
"""So many are a process's first step: what compiles and warms up comes before, or between them."""
MAX_FRAMES = 100
_OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<"})
_OURS = ("agent_client.", "sitecustomize")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")

Line = tuple[CodeType, int]


class ScriptProgress:
    """For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress(clock)
        self._progress.step(0)
        self._groups = self._progress.own.script_groups
        self._moved_at = self._groups.moved_at
        self._is_first = True
        self._place = ScriptPlace()

    def sample(self) -> ProgressSample:
        """`done` counts the collectives."""
        sample, done = self._progress.sample(), self._groups.total
        if self._moved_at != self._groups.moved_at:
            self._moved_at = self._groups.moved_at
            self._progress.tick()
        if self._is_first and done >= FIRST_COLLECTIVES:
            self._is_first = False
            self._progress.step(0)
        at, call = self._place.look(_main_frame(), self._clock(), sample.still_s)
        is_held = sample.still_s >= STILL_S and not sample.is_inside
        phases = (replace(sample.innermost, done=done),)
        return replace(sample, phases=phases, at=at or "?", waits_for=call if is_held else "")


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


class ScriptPlace:
    """The innermost line at which the rank has been for at least half of the time in which it has not moved. Of a loop
    without an end that is where it was called."""

    def __init__(self) -> None:
        self._lines: list[tuple[Line, float]] = []  # the outermost first; and since when

    def look(self, frame: FrameType | None, now: float, still_s: float) -> tuple[str, str]:
        """The line; and the function of torch.distributed that it has called, if it is in one."""
        lines, call = _read(frame)
        same = list(takewhile(lambda pair: pair[0][0] == pair[1], zip(self._lines, lines, strict=False)))
        self._lines = [before for before, _ in same] + [(line, now) for line in lines[len(same) :]]
        if not self._lines:
            return "", call
        stays = [line for line, since in self._lines if now - since >= still_s / 2] or [lines[0]]
        return _shown(*(lines if still_s < STILL_S else stays)[-1]), call


def _read(frame: FrameType | None) -> tuple[list[Line], str]:
    """The script's own lines, the outermost first."""
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
