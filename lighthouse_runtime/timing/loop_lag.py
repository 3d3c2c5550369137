"""Whether this process itself was held up: listeners that judge others by time are told first."""

import logging
from collections.abc import Callable
from contextlib import suppress

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)

CHECKED_EVERY_S = 0.25
LATE_AFTER_S = 0.75


class LoopLag:
    def __init__(self, timers: Timers, follows: str = "no member counts as lost for that time") -> None:
        """`follows`: what that means to others, for the log."""
        self.late_s = 0.0
        """By how much this process was late so far, over all times that it was held up."""
        self._timers = timers
        self._follows = follows
        self._listeners: list[Callable[[float], None]] = []
        self._due_at: float | None = None
        self._timer: Timer | None = None
        self._is_stopped = False

    def listen(self, listener: Callable[[float], None]) -> None:
        """It is told by how many seconds this process was late."""
        self._listeners.append(listener)

    def watch(self) -> None:
        """From now on; again: nothing."""
        if self._timer is None and not self._is_stopped:
            self._due_at = self._timers.time() + CHECKED_EVERY_S
            self._timer = self._timers.call_at(self._due_at, self._check_again)

    def check(self) -> None:
        """Whatever is read first after a pause, the listeners are told of the pause before it."""
        now = self._timers.time()
        if self._due_at is None or now - self._due_at < LATE_AFTER_S:
            return
        by_s, self._due_at = now - self._due_at, now + CHECKED_EVERY_S
        self.late_s += by_s
        log.warning(
            "this process was paused for %.1f s; %s",
            by_s,
            self._follows,
            extra=event("held_up", seconds=by_s),
        )
        for listener in self._listeners:
            listener(by_s)

    def begin_anew(self) -> None:
        """After a stop, it may be watched again."""
        self._is_stopped = False
        self._due_at = self._timer = None

    def stop(self) -> None:
        self._is_stopped = True
        self._due_at = None
        if self._timer is not None:
            self._timer.cancel()

    def _check_again(self) -> None:
        with suppress(LighthouseError):  # a timer has no caller to tell; the listener has said it
            self.check()
        self._timer = None
        self.watch()
