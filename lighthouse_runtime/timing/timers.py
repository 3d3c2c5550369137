"""Timers that take their clock from a port: the tests' clock, or the event loop's."""

import logging
from collections.abc import Callable
from contextlib import suppress

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.stall import StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)


# -- deadline timer -----------------------------------------------------------
#
# One timer: for a machine's next deadline, or for what is to happen after a while.

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


# -- sustained ----------------------------------------------------------------
#
# What is worth a line in the log only if it lasts.


class Sustained:
    """`say` hears a text that has been the same for `after_s`, once; `over`: it was said, and is true no more."""

    def __init__(self, timers: Timers, say: Callable[[str], None], over: Callable[[], None], after_s: float) -> None:
        self._say = say
        self._over = over
        self._after_s = after_s
        self._text = ""
        self._has_said = False
        self._timer = DeadlineTimer(self._lasts, timers)

    def set(self, text: str) -> None:
        """As it is now; empty: there is nothing to say."""
        if text == self._text:
            return
        self.close()
        self._text = text
        if text:
            self._timer.set_after(self._after_s)
        elif self._has_said:
            self._has_said = False
            self._over()

    def close(self) -> None:
        self._timer.cancel()

    def _lasts(self) -> None:
        self._has_said = True
        self._say(self._text)


# -- stall watch --------------------------------------------------------------
#
# Looks, when there may be something to say, whether ranks stall; the verdict goes to the log, once.

LOOKED_AGAIN_S = 1.0  # while nothing moves
SOON_S = 0.05


class StallWatch:
    """`judge(now)` gives the verdict; `job`: where more than one is watched, the one that is meant;
    `left_s(now)`: how long until there may be one, below zero where there is; None:
    no rank is there. `look_s`: a watch that waits looks again after so long at most. `told` hears what the log says: a
    verdict that is new, and None when something moves again. `said` stands until it is over.
    """

    def __init__(
        self,
        timers: Timers,
        log: logging.Logger,
        job: str,
        judge: Callable[[float], StallVerdict | None],
        left_s: Callable[[float], float | None],
        look_s: float,
        told: Callable[[StallVerdict | None], None] = lambda verdict: None,
    ) -> None:
        self.said: StallVerdict | None = None
        self._clock = timers.time
        self._log = log
        self._job = job
        self._judge = judge
        self._left_s = left_s
        self._look_s = look_s
        self._told = told
        self._timer = DeadlineTimer(self.look, timers)

    def wake(self) -> None:
        """A rank is there."""
        if not self._timer.is_set:
            self.look()

    def close(self) -> None:
        self._timer.cancel()

    def look(self) -> None:
        """Now; else that is done when there may be a verdict."""
        now = self._clock()
        self._say(self._judge(now))
        left_s = self._left_s(now)
        if left_s is not None:
            delay_s = max(left_s, SOON_S) if left_s > -SOON_S else LOOKED_AGAIN_S
            self._timer.set_after(min(delay_s, self._look_s))

    def _say(self, verdict: StallVerdict | None) -> None:
        before, self.said = self.said, verdict
        if verdict is not None and not verdict.says_the_same(before):
            behind = [str(name) for name in verdict.behind]
            told = event("stalled", job=self._job, kind=verdict.kind.value, behind=behind, still_s=verdict.still_s)
            self._log.warning("nothing has moved for %.0f s: %s", verdict.still_s, verdict.text, extra=told)
            self._told(verdict)
        elif verdict is None and before is not None:
            self._log.info("progress resumed", extra=event("moving", job=self._job))
            self._told(None)


# -- loop lag -----------------------------------------------------------------
#
# Whether this process itself was held up: listeners that judge others by time are told first.

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
