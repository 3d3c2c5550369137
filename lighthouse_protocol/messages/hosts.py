"""Messages between the supervisors of a replica group that spans several hosts.

The supervisor on host 0 makes the decisions, and the supervisors on the other hosts connect to it.
"""

from dataclasses import dataclass
from typing import Annotated

from lighthouse_protocol.constraints import (
    Age,
    Count,
    EntryCount,
    ExitStatus,
    GroupRank,
    IntRange,
    Name,
    Port,
    Reason,
    Text,
    WorldSize,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, MAX_KEEP_EVERY
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.preemption import PreemptionReport
from lighthouse_protocol.messages.session import EvidenceOffer
from lighthouse_protocol.refusals import InvalidRequest

Ranks = Annotated[tuple[GroupRank, ...], EntryCount(MAX_GROUP_WORLD_SIZE)]


@dataclass(frozen=True, slots=True)
class KeptState:
    """Step and size of the state that a rank keeps in its supervisor's memory."""

    rank: GroupRank
    step: Count = 0  # 0 if it keeps none
    size_bytes: Count = 0
    problem: Reason = ""  # why the last state was not kept


@dataclass(frozen=True, slots=True)
class HostHello:
    """First message on a connection to host 0, from the supervisor on another host."""

    replica_id: Name
    run: Name
    node_rank: WorldSize
    nnodes: WorldSize
    nproc: WorldSize
    incarnation: Name  # new at each start of the supervisor
    # Interval, in steps, at which its ranks keep their states in memory; 0 if they keep none.
    keep_every: Annotated[int, IntRange(0, MAX_KEEP_EVERY, "it is")] = 0

    def check(self) -> None:
        if self.node_rank >= self.nnodes:
            raise InvalidRequest(
                f"is {self.node_rank}; of {self.nnodes} hosts it is 1 to {self.nnodes - 1}", field="node_rank"
            )


@dataclass(frozen=True, slots=True)
class HostHeartbeat:
    """Heartbeat between host 0 and another host, in both directions. A side that hears none closes the connection."""

    kept: Annotated[tuple[KeptState, ...], EntryCount(MAX_GROUP_WORLD_SIZE)] = ()  # by the ranks of the sender's host


@dataclass(frozen=True, slots=True)
class HostRankEnded:
    """Reports to host 0 that a rank's process has exited."""

    rank: GroupRank
    attempt: int
    status: ExitStatus  # exit code, or minus the signal
    cause: Reason = ""  # reported by the rank itself


@dataclass(frozen=True, slots=True)
class HostCheckFailed:
    reason: Reason


@dataclass(frozen=True, slots=True)
class HostEndAsked:
    """Reports that the sending supervisor has received a stop signal, so the group must exit with `status`."""

    status: ExitStatus


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Answer to the ProbeRequest with the same number."""

    number: Count
    outside: ProcessSnapshot


FromHost = HostHello | HostHeartbeat | HostRankEnded | HostCheckFailed | HostEndAsked | ProbeResult | PreemptionReport


@dataclass(frozen=True, slots=True)
class HostWelcome:
    master_address: Text
    master_port: Port


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Order to the supervisor on another host to start ranks."""

    ranks: Ranks
    attempt: int
    unit: Name  # see RankId.unit


@dataclass(frozen=True, slots=True)
class HaltRanks:
    ranks: Ranks
    grace_s: Age


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """Order to every supervisor to exit with `status`, because the group has stopped."""

    status: ExitStatus
    why: Reason
    excluded: Reason = ""  # why the receiving host is excluded; empty if it is not


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Request for a snapshot of a rank's process and its last output.

    Only the supervisor on `host` answers. `pid`, `host`, `started` and `offer` are from the rank's WatchHello.
    """

    number: Count
    rank: GroupRank
    pid: Count
    host: Text
    started: Count
    offer: EvidenceOffer


ToHost = HostWelcome | StartRanks | HaltRanks | GroupEnded | HostHeartbeat | ProbeRequest
