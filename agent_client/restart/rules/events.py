"""What happens to a rank of a run, and what its machine answers with. Pure: no I/O, no clock."""

from dataclasses import dataclass

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
