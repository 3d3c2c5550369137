"""One timer of a running loop, set to a machine's next deadline."""

import asyncio
from collections.abc import Callable

# A timer that a loop fires a little early must not spin.
_EARLY_S = 0.0005


class DeadlineTimer:
    """Calls `tick` once at the deadline that was last set. Loop time is the machines' clock."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._handle: asyncio.TimerHandle | None = None
        self._at: float | None = None

    def set(self, deadline: float | None) -> None:
        if deadline == self._at:
            return
        self.cancel()
        self._at = deadline
        if deadline is not None:
            self._handle = asyncio.get_running_loop().call_at(deadline + _EARLY_S, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._at = None

    def _fire(self) -> None:
        self._handle = self._at = None
        self._tick()
