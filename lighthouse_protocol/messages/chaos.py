"""Faults that `lighthouse chaos` injects into a running job, and their limits.

The lighthouse sends a FaultOrder to the manager of the target group. The manager begins the fault or refuses it, and
answers with a FaultReport. It ends the fault after its duration, even if it has lost its connection to the lighthouse.
"""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.constraints import Age, Count, GroupRank
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL to all processes of a rank, or of all ranks of the group
    STOP = "stop"  # SIGSTOP, and SIGCONT at the end
    CUT = "cut"  # nothing passes between the manager and the lighthouse
    SLOW = "slow"  # messages between the manager and the lighthouse arrive late
    NAN = "nan"  # the rank's next gradient contains a NaN
    OOM = "oom"  # SIGKILL to the rank's process with the most memory, as the kernel does
    DISK = "disk"  # the rank's checkpoints cannot be written


IN_RANK = frozenset({FaultKind.NAN, FaultKind.DISK})  # injected by the rank's Agent
ON_LINK = frozenset({FaultKind.CUT, FaultKind.SLOW})  # affect the manager's connection, so the order names no rank
# A guard kills a process that has been stopped for 12 s, so a longer STOP would become a KILL.
MAX_STOP_S = 10.0
MAX_FAULT_S = 60.0
MAX_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """Order to a manager to begin a fault. The manager forwards the kinds in IN_RANK to the rank."""

    number: Count
    kind: str  # a FaultKind, or an unknown kind of a newer lighthouse
    group_rank: GroupRank | None = None  # None for the whole group
    seconds: Age = 0.0
    delay_s: Age = 0.0  # of each message, for SLOW

    def check_limits(self) -> None:
        """Raise InvalidRequest if the fault exceeds a limit, or if its kind does not apply to the target.

        The codec does not call this, because a manager must answer the order of a newer lighthouse with a FaultReport
        instead of losing its session.
        """
        most_s = MAX_STOP_S if self.kind == FaultKind.STOP else MAX_FAULT_S
        if self.seconds > most_s:
            raise InvalidRequest(f"{self.seconds:g} s; {self.kind} may last up to {most_s:g} s", field="seconds")
        if self.delay_s > MAX_DELAY_S:
            raise InvalidRequest(f"{self.delay_s:g} s; a delay is at most {MAX_DELAY_S:g} s", field="delay_s")
        if self.kind in ON_LINK and self.group_rank is not None:
            raise InvalidRequest(f"{self.kind} hits the manager of a group, not a rank", field="group_rank")
        if self.group_rank is None and self.kind in IN_RANK | {FaultKind.OOM}:
            raise InvalidRequest(f"{self.kind} hits one rank; name it", field="group_rank")


@dataclass(frozen=True, slots=True)
class FaultCancelled:
    """Order to end fault `number` now. The manager ignores it if that fault has already ended."""

    number: Count


@dataclass(frozen=True, slots=True)
class FaultReport:
    """Answer to a FaultOrder: the fault has begun, or the manager has refused it with `error`."""

    number: Count
    step: Count = 0  # step at which the group was working
    error: LighthouseError | None = None
