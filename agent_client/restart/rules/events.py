"""What happens to a rank of a run, and what its machine answers with. Pure: no I/O, no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.run import FromRunRank, RunCompleted, RunCounters, RunStopped, ToRunRank
from lighthouse_protocol.refusals import LighthouseError

# -- events: of the stream. `session` is the number that Connect gave it; what an older one says is nothing any more.


@dataclass(frozen=True, slots=True)
class MessageReceived:
    session: int
    message: ToRunRank


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has ended, or could not be opened. `jitter`: drawn for this event, 0 to 1."""

    session: int
    error: LighthouseError | None = None
    jitter: float = 0.5


# -- events: of the process


@dataclass(frozen=True, slots=True)
class Waiting:
    """It runs nothing, or its function wants the next generation by itself: it waits to be told."""


@dataclass(frozen=True, slots=True)
class Raised:
    """Its function has ended by an exception, its own or the one that interrupted it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    pass


@dataclass(frozen=True, slots=True)
class Closing:
    """Of an elastic run: it is to be over for all, whatever this rank does and did."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """Its function makes progress. `step` never falls within a process."""

    step: int


RankEvent = MessageReceived | StreamClosed | Waiting | Raised | Returned | Closing | StepDone

# -- effects, to be performed in order


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream, and report what becomes of it as `session`. What is sent meanwhile is queued."""

    session: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Give this stream up; it needs no StreamClosed."""

    session: int


@dataclass(frozen=True, slots=True)
class Send:
    session: int
    message: FromRunRank


@dataclass(frozen=True, slots=True)
class Run:
    """Run the function, as rank `rank` of `world_size`."""

    counters: RunCounters
    rank: int
    world_size: int

    @property
    def number(self) -> int:
        return self.counters.number


@dataclass(frozen=True, slots=True)
class StandBy:
    """A generation runs without this rank: it is a spare."""

    counters: RunCounters


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End the function, which is still running. Said again while it is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """It could not be interrupted in time: end the process, so that its supervisor starts it anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """There is nothing more to run: all have finished, the run is stopped, or this rank may not take part."""

    outcome: RunCompleted | RunStopped | LighthouseError


@dataclass(frozen=True, slots=True)
class LighthouseLost:
    reason: str


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """The lighthouse refuses this rank for now: another process has its slot. Asked again until a limit."""

    reason: str


@dataclass(frozen=True, slots=True)
class LighthouseBack:
    """`term`: as in RankWelcome."""

    term: int


RankEffect = (
    Connect | Disconnect | Send | Run | StandBy | Interrupt | Kill | Ended | LighthouseLost | SlotTaken | LighthouseBack
)


# -- config -------------------------------------------------------------------
#
# How long a rank waits for what, and what it can be doing. Pure: no I/O, no clock.


@dataclass(frozen=True, slots=True)
class RankConfig:
    beat_interval_s: float = 1.0
    report_interval_s: float = 0.1
    """Steps are told at most so often."""
    accept_timeout_s: float = 10.0
    lighthouse_timeout_s: float = 600.0
    """A rank that runs nothing and does not reach the lighthouse for that long ends with an error."""
    duplicate_timeout_s: float = 45.0
    """How long a rank that finds its slot taken tries: a predecessor may be dead and not missed yet."""
    interrupt_interval_s: float = 0.5
    hard_timeout_s: float = 90.0
    """What is interrupted and still runs is killed after that."""
    soft_timeout_s: float | None = None
    """A function that has made a step and makes no other for so long has failed."""


class RankPhase(StrEnum):
    """`idle`: it runs nothing, and is not ready."""

    IDLE = "idle"
    READY = "ready"
    SPARE = "spare"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


# -- interrupt timer ----------------------------------------------------------
#
# A function that is interrupted and still runs. Pure: told what happens and what time it is.
#
# It is interrupted at once and again and again, and its process is killed, once, when that does not help in time.
# What is to be done between two functions has as long.


@dataclass(slots=True)
class InterruptTimer:
    interval_s: float
    hard_timeout_s: float
    _reason: str = ""
    _overdue: str = ""
    _interrupt_at: float = 0.0
    _leaves_by: float | None = None

    def begin(self, reason: str, now: float) -> None:
        """tick says the first interruption, too."""
        self._reason, self._interrupt_at, self._leaves_by = reason, now, now + self.hard_timeout_s
        self._overdue = f"still runs {self.hard_timeout_s:g} s after its interruption: {reason}"

    def left(self, now: float) -> None:
        """The function runs no more, and what it has left is ended."""
        self._interrupt_at, self._leaves_by = math.inf, now + self.hard_timeout_s
        self._overdue = f"what the function left behind did not end within {self.hard_timeout_s:g} s"

    def end(self) -> None:
        """That is done, too."""
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
