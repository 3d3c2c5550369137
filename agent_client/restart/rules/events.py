"""Events, effects and settings of a rank's machine, and the timer of its interruptions. No I/O and no clock.

A rank's process feeds the machine with events from its stream to the lighthouse and from its function. The machine
answers with effects, to be performed in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.run import FromRunRank, RunCompleted, RunCounters, RunStopped, ToRunRank
from lighthouse_protocol.refusals import LighthouseError

# -- events of the stream. `session` is the number from Connect; the machine ignores events of older streams.


@dataclass(frozen=True, slots=True)
class MessageReceived:
    session: int
    message: ToRunRank


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has ended, or could not be opened."""

    session: int
    error: LighthouseError | None = None
    jitter: float = 0.5
    """Random number from 0 to 1, drawn for this event."""


# -- events of the process


@dataclass(frozen=True, slots=True)
class Waiting:
    """The process runs nothing and waits, or its function has requested the next generation."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The function has ended with an exception, either its own or the interruption."""

    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    pass


@dataclass(frozen=True, slots=True)
class Closing:
    """An elastic run must end for all ranks, whatever this rank does."""


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int


RankEvent = MessageReceived | StreamClosed | Waiting | Raised | Returned | Closing | StepDone

# -- effects, to be performed in order


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream, and report its events with the number `session`. Messages sent meanwhile are queued."""

    session: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Cancel this stream. It needs no StreamClosed."""

    session: int


@dataclass(frozen=True, slots=True)
class Send:
    session: int
    message: FromRunRank


@dataclass(frozen=True, slots=True)
class Run:
    counters: RunCounters
    rank: int
    """Rank among the active ranks."""
    world_size: int
    """Number of active ranks."""

    @property
    def number(self) -> int:
        return self.counters.number


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Interrupt the function, which is still running. Repeated until it has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process, so that its supervisor restarts it: the interruption took too long."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """End the call. All ranks have finished, the run is stopped, or this rank may not take part."""

    outcome: RunCompleted | RunStopped | LighthouseError


@dataclass(frozen=True, slots=True)
class Notice:
    text: str
    is_warning: bool = True


RankEffect = Connect | Disconnect | Send | Run | Interrupt | Kill | Ended | Notice


@dataclass(frozen=True, slots=True)
class RankConfig:
    beat_interval_s: float = 1.0
    report_interval_s: float = 0.1
    accept_timeout_s: float = 10.0
    lighthouse_timeout_s: float = 600.0
    """How long a rank that runs nothing tolerates an unreachable lighthouse before it ends with an error."""
    duplicate_timeout_s: float = 45.0
    """How long a rank retries while its slot is taken: its dead predecessor may not be detected yet."""
    interrupt_interval_s: float = 0.5
    hard_timeout_s: float = 90.0
    """How long an interrupted function may still run before its process is killed."""
    soft_timeout_s: float | None = None
    """Maximum time between two steps of a function, after its first. Beyond it the function has failed."""


class RankPhase(StrEnum):
    IDLE = "idle"
    READY = "ready"
    SPARE = "spare"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(slots=True)
class InterruptTimer:
    """Times the interruptions of a function that still runs.

    The function is interrupted at once and then at every `interval_s`. If it still runs after `hard_timeout_s`, the
    process is killed, once. Cleanup between two generations has the same limit.
    """

    interval_s: float
    hard_timeout_s: float
    _reason: str = ""
    _overdue: str = ""
    _interrupt_at: float = 0.0
    _leaves_by: float | None = None

    def begin(self, reason: str, now: float) -> None:
        """Start to interrupt. The next `tick` returns the first interruption."""
        self._reason, self._interrupt_at, self._leaves_by = reason, now, now + self.hard_timeout_s
        self._overdue = f"still runs {self.hard_timeout_s:g} s after its interruption: {reason}"

    def left(self, now: float) -> None:
        """Record that the function has ended, and start the limit for the cleanup."""
        self._interrupt_at, self._leaves_by = math.inf, now + self.hard_timeout_s
        self._overdue = f"what the function left behind did not end within {self.hard_timeout_s:g} s"

    def end(self) -> None:
        self._leaves_by = None

    @property
    def deadline(self) -> float | None:
        return None if self._leaves_by is None else min(self._interrupt_at, self._leaves_by)

    def tick(self, now: float) -> Sequence[Interrupt | Kill]:
        if self._leaves_by is None:
            return []
        if now >= self._leaves_by:
            self._leaves_by = None
            return [Kill(self._overdue)]
        if now < self._interrupt_at:
            return []
        self._interrupt_at = now + self.interval_s
        return [Interrupt(self._reason)]
