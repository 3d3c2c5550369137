"""A rank's stream to the lighthouse: open, lost, opened again. Pure: told what happens and what time it is.

1. One stream at a time, each with a number. What is heard of an older one counts no more.
2. It is up when the lighthouse has said anything on it. What does not come up in time, or ends, is opened again after a
   delay that doubles, with jitter, until one is up.
3. What the rank holds is said again on each new stream; what was sent on an older one may be lost.
4. A refusal that no other try mends is final. A rank that finds its slot taken tries for a while: a predecessor may be
   dead and not missed yet.
"""

from dataclasses import dataclass

from lighthouse_protocol.refusals import (
    DuplicateReplica,
    InvalidRequest,
    LighthouseError,
    NotPermitted,
    NotServed,
    Superseded,
    WrongState,
)

_FINAL = (InvalidRequest, WrongState, NotPermitted, NotServed, Superseded)

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0


@dataclass(slots=True)
class Reconnect:
    """`since`: when it was last lost, or first wanted; None while it is up."""

    accept_timeout_s: float
    duplicate_timeout_s: float
    session: int = 0
    is_open: bool = False
    since: float | None = None
    is_lost: bool = False
    _delay_s: float = FIRST_DELAY_S
    _next_at: float | None = None
    _refused_since: float | None = None

    def open(self, now: float) -> int:
        """The number of a new stream, which the caller opens."""
        self.session += 1
        self.is_open = True
        self.since = now if self.since is None else self.since
        self._next_at = now + self.accept_timeout_s
        return self.session

    def accept(self) -> bool:
        """Whether it is back, after a loss that was told."""
        was_lost, self.is_lost = self.is_lost, False
        self.since, self._next_at, self._delay_s, self._refused_since = None, None, FIRST_DELAY_S, None
        return was_lost

    def close(self, now: float, jitter: float) -> bool:
        """Whether that is a loss that was not told yet."""
        is_news, self.is_lost = not self.is_lost, True
        self._close(now, jitter)
        return is_news

    def refuse(self, now: float, jitter: float) -> bool:
        """The slot is taken, which `is_final` has said may change. Whether that is news."""
        self._close(now, jitter)
        return self._refused_since == now

    def _close(self, now: float, jitter: float) -> None:
        self.is_open = False
        self.since = now if self.since is None else self.since
        self._next_at = now + self._delay_s * (0.5 + jitter)
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)

    def is_final(self, error: LighthouseError, now: float) -> bool:
        """`error` has ended it now."""
        if not isinstance(error, DuplicateReplica):
            return isinstance(error, _FINAL)
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since >= self.duplicate_timeout_s

    def give_up(self) -> None:
        """For good."""
        self.is_open, self._next_at = False, None

    def is_due(self, now: float) -> bool:
        """It is to be opened, or, if it is open and was never accepted, to be given up."""
        return self._next_at is not None and now >= self._next_at

    @property
    def next_at(self) -> float | None:
        return self._next_at
