"""What a supervisor's machine hears, and what it wants done. No I/O."""

from dataclasses import dataclass

# -- events


@dataclass(frozen=True, slots=True)
class HostReady:
    """Its supervisor is there, and the lighthouse has let it start."""

    host: int


@dataclass(frozen=True, slots=True)
class HostLost:
    """Its supervisor is gone, and so are its ranks."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process and all that it has started are gone. `cause`: what it said itself of why."""

    rank: int
    attempt: int
    status: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RankSilent:
    """The rank was lost to the group's manager at `lost_at`, and is not back; its process may still be there."""

    rank: int
    lost_at: float
    reason: str


@dataclass(frozen=True, slots=True)
class MisfitReported:
    """The group does not fit its peers, so its ranks end: another model, another script."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The host's health check, before a start."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run is stopped for all."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """Every rank of the run has finished. Those of this group hear it by their own streams, and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class EndAsked:
    """This group shall end, and nothing is restarted from now on.

    `is_leaving`: the ranks still do their step; an EndAsked without it follows. `is_urgent`: a person repeats the
    request: a group that is leaving stops leaving, one whose ranks have their grace ends at once.
    """

    status: int
    why: str
    is_leaving: bool = False
    is_urgent: bool = False


Event = (
    HostReady
    | HostLost
    | RankEnded
    | RankSilent
    | MisfitReported
    | CheckFailed
    | RunStopped
    | RunCompleted
    | KillAsked
    | EndAsked
)

# -- effects


@dataclass(frozen=True, slots=True)
class Start:
    host: int
    ranks: tuple[int, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Halt:
    """SIGTERM, and SIGKILL to what is left after `grace_s`."""

    host: int
    ranks: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class RunStopAsked:
    """The lighthouse is to stop the run for all."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostExcluded:
    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class Logged:
    """For the log: what was decided, and why."""

    text: str
    is_asked: bool = False  # no warning: a person asked, or all is done


@dataclass(frozen=True, slots=True)
class SupervisionEnded:
    """No rank runs, and none will."""

    status: int
    why: str


Effect = Start | Halt | RunStopAsked | HostExcluded | Logged | SupervisionEnded
