"""Warnings that a flood would repeat: a log must not grow at the speed of a flood."""

import logging
import time
from collections.abc import Callable

from lighthouse_runtime.log_event import event

EVERY_S = 10.0


class SparseLog:
    """One line in a while; it says how many have been left out since the last one."""

    def __init__(
        self,
        log: logging.Logger,
        name: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the event of each line."""
        self._log = log
        self._name = name
        self._every_s = every_s
        self._clock = clock
        self._at: float | None = None
        self._left_out = 0

    def warning(self, text: str, *values: object) -> None:
        now = self._clock()
        if self._at is not None and now - self._at < self._every_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such lines were left out before)" if self._left_out else ""
        self._at, self._left_out = now, 0
        self._log.warning(text + "%s", *values, more, extra=event(self._name))
