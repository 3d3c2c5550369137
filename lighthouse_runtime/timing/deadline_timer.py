"""One timer, set to a machine's next deadline."""

from collections.abc import Callable

from lighthouse_runtime.ports import Timer, Timers

# A timer that fires a little early must not spin.
_EARLY_S = 0.0005


class DeadlineTimer:
    """Calls `tick` once at the deadline that was last set. The time of `timers` is the machine's clock."""

    def __init__(self, tick: Callable[[], None], timers: Timers) -> None:
        self._tick = tick
        self._timers = timers
        self._handle: Timer | None = None
        self._at: float | None = None

    def set(self, deadline: float | None) -> None:
        if deadline == self._at:
            return
        self.cancel()
        self._at = deadline
        if deadline is not None:
            self._handle = self._timers.call_at(deadline + _EARLY_S, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._at = None

    def _fire(self) -> None:
        self._handle = self._at = None
        self._tick()
