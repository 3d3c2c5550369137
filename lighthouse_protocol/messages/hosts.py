"""What the supervisors of one replica group's hosts say to each other; host 0 decides. No protobuf."""

from dataclasses import dataclass
from typing import Annotated

from lighthouse_protocol.constraints import (
    Age,
    Count,
    Entries,
    ExitStatus,
    GroupRank,
    Name,
    Port,
    Reason,
    Text,
    WorldSize,
)
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer
from lighthouse_protocol.refusals import InvalidRequest

Ranks = Annotated[tuple[GroupRank, ...], Entries(MAX_GROUP_WORLD_SIZE)]


@dataclass(frozen=True, slots=True)
class HostHello:
    """`incarnation` is new at each start of the supervisor."""

    replica_id: Name
    run: Name
    node_rank: WorldSize
    nnodes: WorldSize
    nproc: WorldSize
    incarnation: Name

    def check(self) -> None:
        if self.node_rank >= self.nnodes:
            raise InvalidRequest(
                f"is {self.node_rank}; of {self.nnodes} hosts it is 1 to {self.nnodes - 1}", field="node_rank"
            )


@dataclass(frozen=True, slots=True)
class HostHeartbeat:
    """Both ways: it lives; for a connection that has died without a word."""


@dataclass(frozen=True, slots=True)
class HostRankEnded:
    """`status`: an exit code, or minus a signal. `cause`: what the rank said itself."""

    rank: GroupRank
    attempt: int
    status: ExitStatus
    cause: Reason = ""


@dataclass(frozen=True, slots=True)
class HostCheckFailed:
    reason: Reason


@dataclass(frozen=True, slots=True)
class HostEndAsked:
    """A signal to that supervisor: the group shall end with that status."""

    status: ExitStatus


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to the ProbeRequest of that number."""

    number: Count
    outside: ProcessSnapshot


FromHost = HostHello | HostHeartbeat | HostRankEnded | HostCheckFailed | HostEndAsked | ProbeResult


@dataclass(frozen=True, slots=True)
class HostWelcome:
    master_address: Text
    master_port: Port


@dataclass(frozen=True, slots=True)
class StartRanks:
    """`unit`: as in RankId."""

    ranks: Ranks
    attempt: int
    unit: Name


@dataclass(frozen=True, slots=True)
class HaltRanks:
    ranks: Ranks
    grace_s: Age


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The group has ended: each supervisor ends with `status`. `excluded`: why that host is; empty: it is not."""

    status: ExitStatus
    why: Reason
    excluded: Reason = ""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What does that process do, and what has its rank written last? Answered by the supervisor whose `host` it is, by
    no other. The fields are those of the rank's WatchHello."""

    number: Count
    rank: GroupRank
    pid: Count
    host: Text
    started: Count
    offer: EvidenceOffer


ToHost = HostWelcome | StartRanks | HaltRanks | GroupEnded | HostHeartbeat | ProbeRequest
