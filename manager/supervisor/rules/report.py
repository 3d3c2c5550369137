"""What the lighthouse must hear of a supervisor, whatever becomes of the stream to it. No I/O, no clock.

A stop that was asked for and a host that is excluded are levels: each new stream begins with them. A loss is told once
it can be. One that was told shortly before its stream broke may not have arrived: it is told again by the next stream,
and the lighthouse counts it once.
"""

from collections import deque
from collections.abc import Callable

from lighthouse_protocol.messages.supervisor import HostExcluded, ProcessLost, StopAsked
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError

MAX_KEPT_LOSSES = 1000
DUPLICATE_TIMEOUT_S = 45.0
"""How long a supervisor that finds its name taken asks again: its predecessor may be gone, and not missed yet."""
DOUBT_S = 60.0
"""What was told so long before a stream broke has arrived: a dead connection is noticed sooner."""


class Report:
    """`send` says something on the present stream; it is called between `welcomed` and `ended` only."""

    def __init__(self, send: Callable[[StopAsked | HostExcluded | ProcessLost], None]) -> None:
        self.stop: StopAsked | None = None
        self._send = send
        self._excluded: HostExcluded | None = None
        self.is_open = False
        self._losses: deque[ProcessLost] = deque(maxlen=MAX_KEPT_LOSSES)
        self._told: deque[tuple[float, ProcessLost]] = deque(maxlen=MAX_KEPT_LOSSES)
        self._refused_since: float | None = None

    def is_final(self, error: LighthouseError, now: float) -> bool:
        """The lighthouse refuses this supervisor: whether asking again is of no use."""
        if not isinstance(error, DuplicateReplica):
            return True
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since >= DUPLICATE_TIMEOUT_S

    def welcomed(self, now: float) -> None:
        """By a new stream."""
        self.is_open, self._refused_since = True, None
        for level in (self._excluded, self.stop):
            if level is not None:
                self._send(level)
        self._send_losses(now)

    def ended(self, now: float) -> None:
        """The stream has."""
        self.is_open = False
        doubtful = [lost for told_at, lost in self._told if told_at >= now - DOUBT_S]
        self._told.clear()
        self._losses = deque((*doubtful, *self._losses), maxlen=MAX_KEPT_LOSSES)

    def lose(self, lost: ProcessLost, now: float) -> None:
        self._losses.append(lost)
        self._send_losses(now)

    def ask_stop(self, reason: str) -> None:
        self.stop = StopAsked(reason)
        if self.is_open:
            self._send(self.stop)

    def exclude(self, reason: str) -> None:
        self._excluded = HostExcluded(reason)
        if self.is_open:
            self._send(self._excluded)

    def _send_losses(self, now: float) -> None:
        while self.is_open and self._losses:
            lost = self._losses.popleft()
            self._send(lost)
            self._told.append((now, lost))
