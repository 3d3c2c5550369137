"""Events, effects and settings of a rank's state machine, and the timer for its interruptions.

This module does no I/O and reads no clock. A rank's process passes events from its lighthouse stream and its function
to the state machine, which returns effects that the process must perform in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.run import FromRunRank, RunCompleted, RunCounters, RunStopped, ToRunRank
from lighthouse_protocol.refusals import LighthouseError

# -- events of the stream. `session` is the number from Connect. Events of older streams are ignored.


@dataclass(frozen=True, slots=True)
class MessageReceived:
    session: int
    message: ToRunRank


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has been closed, or could not be opened."""

    session: int
    error: LighthouseError | None = None
    jitter: float = 0.5
    """Random number from 0 to 1, drawn for this event."""


# -- events of the process


@dataclass(frozen=True, slots=True)
class Waiting:
    """The process is ready for the next generation, or its running function has requested it."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The wrapped function has raised an exception: its own, or the one that interrupted it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    pass


@dataclass(frozen=True, slots=True)
class Closing:
    """The process wants to end an elastic run for all ranks."""


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int


RankEvent = MessageReceived | StreamClosed | Waiting | Raised | Returned | Closing | StepDone

# -- effects, to be performed in order


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream whose events carry the number `session`. While it is being opened, queue messages that are sent."""

    session: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Cancel the stream. The state machine expects no StreamClosed event afterwards."""

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
    """Interrupt the running function. This effect is repeated until the function has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process, because its function did not end in time. A supervisor restarts it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """End the wrapped call, because all ranks have finished, the run was stopped, or this rank cannot take part."""

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
    """Time in seconds for which a waiting rank tolerates an unreachable lighthouse before it fails with an error."""
    duplicate_timeout_s: float = 45.0
    """Time in seconds for which a rank retries if another process has its slot, because the lighthouse may not have
    detected yet that the previous process died."""
    interrupt_interval_s: float = 0.5
    hard_timeout_s: float = 90.0
    """Time in seconds for which an interrupted function may still run before its process is killed."""
    soft_timeout_s: float | None = None
    """Maximum time in seconds between two steps of the function, once it has reported a step. If it is exceeded, the
    function counts as failed. None disables the limit."""


class RankPhase(StrEnum):
    IDLE = "idle"
    READY = "ready"
    SPARE = "spare"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(slots=True)
class InterruptTimer:
    """Decides when to interrupt a function that must end, and when to kill its process.

    The function is interrupted immediately and then every `interval_s` seconds. If it is still running after
    `hard_timeout_s`, the process is killed. The cleanup between two generations has the same time limit.
    """

    interval_s: float
    hard_timeout_s: float
    _reason: str = ""
    _overdue: str = ""
    _interrupt_at: float = 0.0
    _leaves_by: float | None = None

    def start(self, reason: str, now: float) -> None:
        """Start interrupting the function. The next `tick` returns the first interruption."""
        self._reason, self._interrupt_at, self._leaves_by = reason, now, now + self.hard_timeout_s
        self._overdue = f"still runs {self.hard_timeout_s:g} s after its interruption: {reason}"

    def start_cleanup(self, now: float) -> None:
        """Record that the function has ended, and start the time limit for the cleanup."""
        self._interrupt_at, self._leaves_by = math.inf, now + self.hard_timeout_s
        self._overdue = f"what the function left behind did not end within {self.hard_timeout_s:g} s"

    def stop(self) -> None:
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
