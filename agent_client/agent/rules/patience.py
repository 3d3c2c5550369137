"""What a rank does after requests for a quorum that were not granted. No I/O.

1. A refusal that no further request can change ends the rank at once.
2. A refusal that may pass (another process of that name still lives, a quorum was revoked before it began) ends the
   rank after `limit` in a row.
3. Waiting is legitimate: for further groups, for a lighthouse, for a manager that starts again. It never ends a rank,
   and is logged regularly, with its reason.
"""

from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotServed,
    Superseded,
    Unreachable,
    Unrecoverable,
)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
SAID_FROM = 3  # requests in a row
SAID_EVERY_S = 60.0

_FINAL = (InvalidRequest, NotServed, Unrecoverable)
_WAITS = (DeadlinePassed, Unreachable, Superseded, LimitReached)


class Patience:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tries = self._refusals = 0
        self._began_at = self._said_at = 0.0
        self.backoff_s = 0.0
        """How long to wait before the next request."""

    def answered(self) -> None:
        """A request was granted."""
        self._tries = self._refusals = 0

    def refused(self, error: LighthouseError, now: float) -> str:
        """Why this rank must end; empty: it asks again."""
        if self._tries == 0:
            self._began_at = self._said_at = now
        self.backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._tries, 10))
        self._tries += 1
        if isinstance(error, _FINAL):
            return str(error)
        self._refusals = 0 if isinstance(error, _WAITS) else self._refusals + 1
        if self._refusals < self._limit:
            return ""
        return f"{self._refusals} requests for a quorum refused in a row (max_consecutive_discards): {error}"

    def take_news(self, error: LighthouseError, now: float) -> str:
        """What to log as an error now; empty: nothing."""
        is_first = self._tries == SAID_FROM
        if self._tries < SAID_FROM or not (is_first or now >= self._said_at + SAID_EVERY_S):
            return ""
        self._said_at = now
        return f"no quorum since {now - self._began_at:.0f} s, after {self._tries} requests; asking on: {error}"
