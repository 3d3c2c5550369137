"""Events and effects of the supervision machine.

Events report what happened to hosts, ranks and the run. Effects are what the driver must do in response.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostReady:
    """The host's supervisor is connected, and the lighthouse has admitted it."""

    host: int


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host's supervisor disconnected, so its ranks are lost."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process and all of its descendants have ended."""

    rank: int
    attempt: int
    status: int
    cause: str = ""  # the rank's own explanation, or empty


@dataclass(frozen=True, slots=True)
class RankSilent:
    """The group's manager has lost a rank whose process may still exist."""

    rank: int
    lost_at: float  # when the manager lost it
    reason: str


@dataclass(frozen=True, slots=True)
class MisfitReported:
    """The group's ranks end because it does not fit its peers: another model or another script."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The host's health check failed before a start."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run is stopped for all groups."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """All ranks of the run have finished. This group's ranks learn it on their own streams, and exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class EndAsked:
    """This group must end; nothing restarts from now on."""

    status: int
    why: str
    is_leaving: bool = False  # the ranks finish their step; an EndAsked without this flag follows
    is_urgent: bool = False  # a repeated request: a leaving group stops at once, and one in its grace period is killed


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


@dataclass(frozen=True, slots=True)
class Start:
    host: int
    ranks: tuple[int, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Halt:
    """Send SIGTERM, then SIGKILL to the ranks that remain after `grace_s` seconds."""

    host: int
    ranks: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class RunStopAsked:
    """The lighthouse must stop the run for all groups."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostExcluded:
    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class Logged:
    """Log a decision and its reason."""

    text: str
    is_asked: bool = False  # at level INFO: a person requested it, or the work is done


@dataclass(frozen=True, slots=True)
class SupervisionEnded:
    """No rank runs, and none will start."""

    status: int
    why: str


Effect = Start | Halt | RunStopAsked | HostExcluded | Logged | SupervisionEnded
