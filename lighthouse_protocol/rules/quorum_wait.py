"""When a wait for a quorum is worth a line: once it lasts, when its reason changes, and every minute. No I/O.

A request whose time is over is asked again: a wait goes on over such gaps, and ends with an answer.
"""

SAID_AFTER_S = 5.0
CHANGED_AFTER_S = 10.0
REPEATED_AFTER_S = 60.0
LOOKED_EVERY_S = 1.0
ASKED_AGAIN_WITHIN_S = 2.0


class QuorumWait:
    """Time is the caller's monotonic clock and never goes back."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._left_at: float | None = None
        self._said: str | None = None
        self._said_at = 0.0

    @property
    def is_under_way(self) -> bool:
        return self._since is not None and self._left_at is None

    def begin(self, now: float) -> None:
        """A request waits. It may have waited before."""
        if self._left_at is not None and now > self._left_at + ASKED_AGAIN_WITHIN_S:
            self.answered(now)
        self._since, self._left_at = now if self._since is None else self._since, None

    def leave(self, now: float) -> None:
        """No request waits, and none was answered."""
        if self.is_under_way:
            self._left_at = now

    def answered(self, now: float) -> str:
        """The line that ends those that were said; empty: there were none."""
        said, since = self._said, self._since
        self._since = self._left_at = self._said = None
        return "" if said is None or since is None else f"there is a quorum, after {now - since:.0f} s"

    def next_at(self, now: float) -> float | None:
        """When to ask for news again; None: no request waits."""
        if self._since is None or self._left_at is not None:
            return None
        if self._said is None:
            return self._since + SAID_AFTER_S
        return max(self._said_at + CHANGED_AFTER_S, now + LOOKED_EVERY_S)

    def news(self, waiting_for: str, now: float) -> str:
        """The line that is due; empty: none is."""
        if self._since is None or self._left_at is not None or now < self._since + SAID_AFTER_S:
            return ""
        after_s = REPEATED_AFTER_S if waiting_for == self._said else CHANGED_AFTER_S
        if self._said is not None and now < self._said_at + after_s:
            return ""
        self._said, self._said_at = waiting_for, now
        return f"no quorum for {now - self._since:.0f} s: waiting for {waiting_for}"
