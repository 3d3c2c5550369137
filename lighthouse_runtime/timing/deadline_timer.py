"""One timer: for a machine's next deadline, or for what is to happen after a while."""

from collections.abc import Callable

from lighthouse_runtime.ports import Timer, Timers

# A timer that fires a little early must not spin.
_EARLY_S = 0.0005


class DeadlineTimer:
    """Calls `tick` once, when it was last set for. The time of `timers` is the machine's clock."""

    def __init__(self, tick: Callable[[], None], timers: Timers) -> None:
        self._tick = tick
        self._timers = timers
        self._handle: Timer | None = None
        self._at: float | None = None

    @property
    def is_set(self) -> bool:
        return self._at is not None

    def set_after(self, delay_s: float) -> None:
        self.cancel()
        self._at = self._timers.time() + delay_s
        self._handle = self._timers.call_later(delay_s, self._fire)

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
