"""Events and effects of the supervisor's state machine (machine.py).

Events report what happened to hosts, ranks and the run. Effects are what the driver must do in response.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostReady:
    """The host's supervisor is connected, and the lighthouse has admitted it."""

    host: int


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host's supervisor has disconnected, so its ranks are lost."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process and all of its descendants have ended."""

    rank: int
    attempt: int
    status: int
    cause: str = ""  # the rank's own explanation, or an empty string


@dataclass(frozen=True, slots=True)
class RankSilent:
    """The group's manager counts the current process of a rank as lost, but this process may still exist."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class MisfitReported:
    """The group does not fit its peers: its model or its script is different. Its ranks are about to exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckPassed:
    """The health check of a rank's host has passed, so the rank starts only now. Only host 0 reports this."""

    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The host's health check has failed, so its ranks have not been started."""

    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The run has been stopped for all groups."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """All ranks in the run have finished. The lighthouse notifies this group's ranks itself, and they exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class EndAsked:
    """This group must end. No rank restarts from now on."""

    status: int
    why: str
    is_leaving: bool = False  # let the ranks complete their step first; an EndAsked without this flag follows
    is_urgent: bool = False  # repeated request: stop a leaving group immediately, or kill it in its grace period
    grace_s: float = 0.0  # minimum time from SIGTERM to SIGKILL of the ranks, if it exceeds --termination-grace


Event = (
    HostReady
    | HostLost
    | RankEnded
    | RankSilent
    | MisfitReported
    | CheckPassed
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
    """Send SIGTERM to the ranks, and SIGKILL to the ranks that are still running after `grace_s` seconds."""

    host: int
    ranks: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class RunStopAsked:
    """Ask the lighthouse to stop the run for all groups."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostExcluded:
    host: int
    reason: str


@dataclass(frozen=True, slots=True)
class Logged:
    """Log a decision and its reason."""

    text: str
    is_asked: bool = False  # log at level INFO, because a person requested it or the work is done


@dataclass(frozen=True, slots=True)
class SupervisionEnded:
    """End the supervisor, because no rank is running and none will be started."""

    status: int
    why: str


Effect = Start | Halt | RunStopAsked | HostExcluded | Logged | SupervisionEnded
