"""Timers for deadlines, stall checks, conditions that must hold for a while, and pauses of this process.

They are based on ports.Timers.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.stall import StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)


_EARLY_S = 0.0005  # keeps a timer that fires slightly early from spinning


class DeadlineTimer:
    """Calls `tick` once, at a time that can be changed. Setting a new time replaces the old one."""

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


class DelayedAlert:
    """Reports when a condition has lasted for `after_s` seconds, and when such a condition ends."""

    def __init__(self, timers: Timers, report: Callable[[str], None], after_s: float) -> None:
        """Create an alert for a condition that does not hold yet.

        `report` is called with a description of the condition once it has lasted for `after_s` seconds, and with an
        empty string when such a condition ends.
        """
        self._report = report
        self._after_s = after_s
        self._text = ""
        self._is_reported = False
        self._timer = DeadlineTimer(self._report_lasting, timers)

    def set(self, text: str) -> None:
        """Set the description of the current condition. An empty string means that the condition has ended."""
        if text == self._text:
            return
        self.close()
        self._text = text
        if text:
            self._timer.set_after(self._after_s)
        elif self._is_reported:
            self._is_reported = False
            self._report("")

    def close(self) -> None:
        self._timer.cancel()

    def _report_lasting(self) -> None:
        self._is_reported = True
        self._report(self._text)


# Periodic checks for stalled ranks.

RECHECKED_AFTER_S = 1.0  # while nothing moves
SOON_S = 0.05


class Judge(Protocol):
    """Decides for a `StallWatch` whether the ranks of a job or a group have stalled."""

    def judge_ranks(self, now: float) -> StallVerdict | None:
        """Return the current verdict, or None if the ranks make progress."""
        ...

    def verdict_in_s(self, now: float) -> float | None:
        """Return the seconds until a verdict is possible: negative if it already is, None if there are no ranks."""
        ...

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        """Handle a new verdict, or None when progress resumes."""
        ...


class StallWatch:
    """Checks regularly whether the ranks have stalled. Logs each new verdict, and when progress resumes.

    `verdict` is the current verdict, or None while the ranks make progress.
    """

    def __init__(
        self,
        timers: Timers,
        log: logging.Logger,
        job: str,
        judge: Judge,
        look_s: float,
    ) -> None:
        """Create a stopped watch. Start it with wake().

        Args:
            timers: Clock and timers for the checks.
            log: Logger for the verdicts.
            job: Name of the job, for the log lines.
            judge: Judges the ranks and receives new verdicts.
            look_s: Maximum interval between checks in seconds.
        """
        self.verdict: StallVerdict | None = None
        self._clock = timers.time
        self._log = log
        self._job = job
        self._judge = judge
        self._look_s = look_s
        self._timer = DeadlineTimer(self.check_now, timers)

    def wake(self) -> None:
        """Check for a stall now, unless a check is scheduled. Call this when a rank appears."""
        if not self._timer.is_set:
            self.check_now()

    def close(self) -> None:
        self._timer.cancel()

    def check_now(self) -> None:
        """Check for a stall now. Schedule the next check, unless there are no ranks."""
        now = self._clock()
        self._update(self._judge.judge_ranks(now))
        left_s = self._judge.verdict_in_s(now)
        if left_s is not None:
            delay_s = max(left_s, SOON_S) if left_s > -SOON_S else RECHECKED_AFTER_S
            self._timer.set_after(min(delay_s, self._look_s))

    def _update(self, verdict: StallVerdict | None) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict is not None and not verdict.is_same_as(before):
            behind = [str(name) for name in verdict.behind]
            fields = event("stalled", job=self._job, kind=verdict.kind.value, behind=behind, still_s=verdict.still_s)
            self._log.warning("nothing has moved for %.0f s: %s", verdict.still_s, verdict.text, extra=fields)
            self._judge.handle_verdict(verdict)
        elif verdict is None and before is not None:
            self._log.info("progress resumed", extra=event("moving", job=self._job))
            self._judge.handle_verdict(None)


# Pauses of this process, detected by the delay of a timer.

CHECKED_EVERY_S = 0.25
LATE_AFTER_S = 0.75


class LoopLag:
    """Detects pauses of the event loop and reports them to listeners.

    A listener must not treat peers as silent during a pause, because this process could not read their messages then.
    """

    def __init__(self, timers: Timers, follows: str = "no member counts as lost for that time") -> None:
        """Create a stopped monitor. `follows` states the consequence of a pause, and ends the log line about it."""
        self.late_s = 0.0  # total length of all pauses
        self._timers = timers
        self._follows = follows
        self._listeners: list[Callable[[float], None]] = []
        self._due_at: float | None = None
        self._timer: Timer | None = None
        self._is_stopped = False

    def listen(self, listener: Callable[[float], None]) -> None:
        """Add a callback that receives the length of each pause in seconds."""
        self._listeners.append(listener)

    def watch(self) -> None:
        """Start monitoring. Further calls do nothing."""
        if self._timer is None and not self._is_stopped:
            self._due_at = self._timers.time() + CHECKED_EVERY_S
            self._timer = self._timers.call_at(self._due_at, self._check_again)

    def check(self) -> None:
        """Check for a pause that has just ended, and report it. Call this before handling input from a peer."""
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
