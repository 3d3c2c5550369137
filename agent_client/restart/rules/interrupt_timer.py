"""A function that is interrupted and still runs. Pure: told what happens and what time it is.

It is interrupted at once and again and again, and its process is killed, once, when that does not help in time. What is
to be done between two functions has as long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_client.restart.rules.events import Interrupt, Kill


@dataclass(slots=True)
class InterruptTimer:
    interval_s: float
    hard_timeout_s: float
    _reason: str = ""
    _overdue: str = ""
    _interrupt_at: float = 0.0
    _leaves_by: float | None = None

    def begin(self, reason: str, now: float) -> None:
        """tick says the first interruption, too."""
        self._reason, self._interrupt_at, self._leaves_by = reason, now, now + self.hard_timeout_s
        self._overdue = f"still runs {self.hard_timeout_s:g} s after its interruption: {reason}"

    def left(self, now: float) -> None:
        """The function runs no more, and what it has left is ended."""
        self._interrupt_at, self._leaves_by = math.inf, now + self.hard_timeout_s
        self._overdue = f"what the function left behind did not end within {self.hard_timeout_s:g} s"

    def end(self) -> None:
        """That is done, too."""
        self._leaves_by = None

    @property
    def deadline(self) -> float | None:
        return None if self._leaves_by is None else min(self._interrupt_at, self._leaves_by)

    def tick(self, now: float) -> Sequence[Interrupt | Kill]:
        if self._leaves_by is None:
            return []
        if now >= self._leaves_by:
            self._leaves_by = None
            return [Kill(self._overdue)]
        if now < self._interrupt_at:
            return []
        self._interrupt_at = now + self.interval_s
        return [Interrupt(self._reason)]
