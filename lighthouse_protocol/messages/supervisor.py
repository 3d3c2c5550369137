"""What a supervisor, who starts and restarts the ranks of one host, and the lighthouse say to each other. No protobuf.

Not only runs of wrapped functions have supervisors: the stop of a run holds for all who share its run id.
"""

from dataclasses import dataclass, field
from typing import Annotated

from lighthouse_protocol.constraints import Age, Count, Entries, Name, Output, Reason, Seconds, Secret, Slot, Text
from lighthouse_protocol.limits import MAX_RANKS_PER_HOST
from lighthouse_protocol.messages.run import HelloRejected, RankId, RunCompleted, RunStopped


@dataclass(frozen=True, slots=True)
class SupervisorHello:
    """`name`: in its run: the replica group's id, with /K for host K of several. `slots`: of the ranks it starts.
    `secret`: random, made by this start of the supervisor, and known to its ranks."""

    name: Name
    incarnation: Name
    host: Text = ""
    slots: Annotated[tuple[Slot, ...], Entries(MAX_RANKS_PER_HOST)] = ()
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class SupervisorHeartbeat:
    """Sent while the supervisor runs, so that a connection that has died without a close is noticed.

    Attributes:
        budget_used: Share of the restart budget that is used up, from 0 to 1.
        restarts: Restarts since the supervisor was started.
        restarts_left: Restarts that the budget still allows now, of the ranks that have the fewest.
        running: Processes of ranks that are running.
    """

    budget_used: Age = 0.0
    restarts: Count = 0
    restarts_left: Count = 0
    running: Count = 0


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """A rank's process has ended. `output`: the last lines that it wrote."""

    rank: RankId
    reason: Reason
    output: Output = ()


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The run shall stop for all: an exit by 130, an exhausted budget."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class HostExcluded:
    """This host's hardware has failed its check, or its ranks too often in a row: none of it comes back."""

    reason: Reason


FromSupervisor = SupervisorHello | SupervisorHeartbeat | ProcessLost | StopAsked | HostExcluded


@dataclass(frozen=True, slots=True)
class SupervisorWelcome:
    """The run is not stopped, and this host is not excluded: start."""

    beat_interval_s: Seconds


ToSupervisor = SupervisorWelcome | RunStopped | RunCompleted | HelloRejected
