"""Progress display of rank 0 of a training example: a bar on a terminal, elsewhere a line every few seconds."""

import logging
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

LINES_EVERY_S = 5.0
FRAMES_EVERY_S = 0.1


class ProgressBar:
    """Display of the progress of a training that lasts `steps` steps.

    Example:
        with ProgressBar(steps) as progress:
            progress.show(step, groups, loss)
    """

    def __init__(self, steps: int, lines_every_s: float = LINES_EVERY_S) -> None:
        """Prepare the display. Without a terminal, it prints at most one line in `lines_every_s` seconds."""
        self._steps = steps
        self._is_mine = os.environ.get("RANK", "0") == "0"
        self._bar = _bar() if self._is_mine and sys.stdout.isatty() else None
        self._every_s = lines_every_s if self._bar is None else FRAMES_EVERY_S
        self._task = None if self._bar is None else self._bar.add_task("", total=steps, text="no step yet")
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._shown = 0
        self._next_at = 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            before = sys.stderr
            self._bar.start()
            self._log_above(before)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)

    def show(self, step: int, groups: int, loss: "torch.Tensor | float") -> None:
        """Show that `groups` replica groups have committed `step`. Read `loss` from its device only if it is shown."""
        now = time.monotonic()
        if not self._is_mine or step == self._shown or (now < self._next_at and step < self._steps):
            return
        self._shown, self._next_at = step, now + self._every_s
        if self._bar is None:
            print(f"step {step}: {_text(groups, loss)}", flush=True)
        elif self._task is not None:
            self._bar.update(self._task, completed=step, text=_text(groups, loss), refresh=True)

    def _log_above(self, stderr: Any) -> None:
        # rich has replaced sys.stderr with its own stream, which prints log lines above the bar instead of inside it.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                self._handlers.append((handler, stderr))
                handler.setStream(sys.stderr)


def _text(groups: int, loss: "torch.Tensor | float") -> str:
    value = loss if isinstance(loss, float | int) else loss.item()
    return f"{groups} {'group' if groups == 1 else 'groups'}, loss {value:.3f}"


def _bar() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[text]},"),
        TimeRemainingColumn(),
        TextColumn("left"),
        auto_refresh=False,
    )
