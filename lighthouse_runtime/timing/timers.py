"""Timers over `lighthouse_runtime.ports.Timers`: deadlines, lasting conditions, stalls, and pauses of this process."""

import logging
from collections.abc import Callable
from contextlib import suppress

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.stall import StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)


_EARLY_S = 0.0005  # keeps a timer that fires slightly early from spinning


class DeadlineTimer:
    """A single timer that calls `tick` at the last time set. It uses the clock of `timers`."""

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


# Conditions that are logged only if they last.


class SustainedNotice:
    """Reports a text that has been unchanged for `after_s`, and its end."""

    def __init__(
        self, timers: Timers, on_lasting: Callable[[str], None], on_over: Callable[[], None], after_s: float
    ) -> None:
        """Create a notice without a text.

        Args:
            timers: The clock.
            on_lasting: Called once with each text that lasts.
            on_over: Called when a reported text is no longer true.
            after_s: Seconds until a text is reported.
        """
        self._on_lasting = on_lasting
        self._on_over = on_over
        self._after_s = after_s
        self._text = ""
        self._is_reported = False
        self._timer = DeadlineTimer(self._report, timers)

    def set(self, text: str) -> None:
        """Set the current text, empty if there is nothing to report."""
        if text == self._text:
            return
        self.close()
        self._text = text
        if text:
            self._timer.set_after(self._after_s)
        elif self._is_reported:
            self._is_reported = False
            self._on_over()

    def close(self) -> None:
        self._timer.cancel()

    def _report(self) -> None:
        self._is_reported = True
        self._on_lasting(self._text)


# Periodic checks for stalled ranks.

RECHECKED_AFTER_S = 1.0  # while nothing moves
SOON_S = 0.05


class StallWatch:
    """Checks for stalls when one is possible, and logs each new verdict and its end.

    `verdict` is the current verdict, or None while ranks move.
    """

    def __init__(
        self,
        timers: Timers,
        log: logging.Logger,
        job: str,
        judge: Callable[[float], StallVerdict | None],
        left_s: Callable[[float], float | None],
        look_s: float,
        on_change: Callable[[StallVerdict | None], None] = lambda verdict: None,
    ) -> None:
        """Create a watch. wake() starts it.

        Args:
            timers: The clock.
            log: Receives the lines.
            job: Job in the fields of the lines.
            judge: Returns the verdict at a time.
            left_s: Returns the seconds until a verdict is possible, or None without ranks. May be negative.
            look_s: Maximum interval between checks.
            on_change: Called with each new verdict, and with None when ranks move again.
        """
        self.verdict: StallVerdict | None = None
        self._clock = timers.time
        self._log = log
        self._job = job
        self._judge = judge
        self._left_s = left_s
        self._look_s = look_s
        self._on_change = on_change
        self._timer = DeadlineTimer(self.check_now, timers)

    def wake(self) -> None:
        """Check now unless a check is scheduled. Call it when a rank appears."""
        if not self._timer.is_set:
            self.check_now()

    def close(self) -> None:
        self._timer.cancel()

    def check_now(self) -> None:
        """Check for a stall and schedule the next check."""
        now = self._clock()
        self._update(self._judge(now))
        left_s = self._left_s(now)
        if left_s is not None:
            delay_s = max(left_s, SOON_S) if left_s > -SOON_S else RECHECKED_AFTER_S
            self._timer.set_after(min(delay_s, self._look_s))

    def _update(self, verdict: StallVerdict | None) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict is not None and not verdict.is_same_as(before):
            behind = [str(name) for name in verdict.behind]
            fields = event("stalled", job=self._job, kind=verdict.kind.value, behind=behind, still_s=verdict.still_s)
            self._log.warning("nothing has moved for %.0f s: %s", verdict.still_s, verdict.text, extra=fields)
            self._on_change(verdict)
        elif verdict is None and before is not None:
            self._log.info("progress resumed", extra=event("moving", job=self._job))
            self._on_change(None)


# Pauses of this process, detected by the delay of a timer.

CHECKED_EVERY_S = 0.25
LATE_AFTER_S = 0.75


class LoopLag:
    """Reports pauses of the event loop to listeners, before they judge the silence of others."""

    def __init__(self, timers: Timers, follows: str = "no member counts as lost for that time") -> None:
        """Create a stopped monitor. `follows` completes the log line with the consequence of a pause."""
        self.late_s = 0.0  # total length of all pauses
        self._timers = timers
        self._follows = follows
        self._listeners: list[Callable[[float], None]] = []
        self._due_at: float | None = None
        self._timer: Timer | None = None
        self._is_stopped = False

    def listen(self, listener: Callable[[float], None]) -> None:
        """Add a listener, which is called with the length of each pause in seconds."""
        self._listeners.append(listener)

    def watch(self) -> None:
        """Start monitoring. Further calls do nothing."""
        if self._timer is None and not self._is_stopped:
            self._due_at = self._timers.time() + CHECKED_EVERY_S
            self._timer = self._timers.call_at(self._due_at, self._check_again)

    def check(self) -> None:
        """Detect a pause that ends now, and call the listeners. Call this before reading the first input after it."""
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

    def restart(self) -> None:
        """Allow watch() again after stop()."""
        self._is_stopped = False
        self._due_at = self._timer = None

    def stop(self) -> None:
        self._is_stopped = True
        self._due_at = None
        if self._timer is not None:
            self._timer.cancel()

    def _check_again(self) -> None:
        with suppress(LighthouseError):  # a listener has logged it, and a timer has no caller
            self.check()
        self._timer = None
        self.watch()
