"""How often a function that fails in its process is run again, and how long that waits. No I/O, no clock.

1. More failures within the window than the budget has are the end of the run.
2. After a generation that got somewhere, the next one begins at once. After one that got nowhere (no step, and over
   soon) it waits, and twice as long each time in a row.

Processes that die are not counted: their supervisor has a budget of its own.
"""

from collections.abc import Iterable

from lighthouse_protocol.messages.run import RunTerms

MAX_DELAY_S = 30.0
GETS_SOMEWHERE_S = 10.0
"""A generation that lasts for so long has got somewhere, also one that tells no steps."""


class RestartBudget:
    """`failed_at`: when the function failed, the newest last. Moments are of one clock of the caller's."""

    def __init__(self, failed_at: Iterable[float] = ()) -> None:
        self.failed_at = tuple(failed_at)
        self._in_vain = 0

    def fail(self, terms: RunTerms, now: float, *, lasted_s: float, has_stepped: bool) -> float:
        """A generation has failed. Returns after how many seconds the next one may begin."""
        if terms.max_restarts is not None:
            recent = [at for at in self.failed_at if now - at < terms.restart_window_s]
            self.failed_at = (*recent, now)[-terms.max_restarts - 1 :]
        self._in_vain = 0 if has_stepped or lasted_s >= GETS_SOMEWHERE_S else self._in_vain + 1
        if not self._in_vain or terms.restart_delay_s is None:
            return 0.0
        return min(MAX_DELAY_S, terms.restart_delay_s * 2.0 ** min(self._in_vain - 1, 60))

    def used(self, terms: RunTerms, now: float) -> float:
        """How much of it, at that moment: 0 none, 1 all."""
        if terms.max_restarts is None:
            return 0.0
        recent = sum(now - at < terms.restart_window_s for at in self.failed_at)
        return share_used(recent, terms.max_restarts)

    def why_exhausted(self, terms: RunTerms) -> str:
        """Why there is no further restart; empty: there is one."""
        if terms.max_restarts is None or len(self.failed_at) <= terms.max_restarts:
            return ""
        return f"max_restarts: {terms.max_restarts} restarts within {terms.restart_window_s:g} s are used up"


def share_used(restarts: int, max_restarts: int) -> float:
    """A budget without restarts is used up by the first failure, and not before."""
    return min(1.0, restarts / max_restarts) if max_restarts else float(restarts > 0)
