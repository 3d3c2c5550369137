"""Looks, when there may be something to say, whether ranks stall; the verdict goes to the log, once."""

import logging
from collections.abc import Callable

from lighthouse_protocol.rules.stall import StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer

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
