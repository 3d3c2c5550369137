"""What the supervisors of one replica group's hosts say to each other; host 0 decides. No protobuf."""

from dataclasses import dataclass

from lighthouse_protocol.messages.evidence import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer


@dataclass(frozen=True, slots=True)
class HostHello:
    """`incarnation` is new at each start of the supervisor."""

    replica_id: str
    run: str
    node_rank: int
    nnodes: int
    nproc: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class HostHeartbeat:
    """Both ways: it lives; for a connection that has died without a word."""


@dataclass(frozen=True, slots=True)
class HostRankEnded:
    """`status`: an exit code, or minus a signal. `cause`: what the rank said itself."""

    rank: int
    attempt: int
    status: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class HostCheckFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class HostEndAsked:
    """A signal to that supervisor: the group shall end with that status."""

    status: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to the NodeLook of that number."""

    number: int
    outside: ProcessSnapshot


FromHost = HostHello | HostHeartbeat | HostRankEnded | HostCheckFailed | HostEndAsked | ProbeResult


@dataclass(frozen=True, slots=True)
class HostWelcome:
    master_address: str
    master_port: int


@dataclass(frozen=True, slots=True)
class StartRanks:
    ranks: tuple[int, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class HaltRanks:
    ranks: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The group has ended: each supervisor ends with `status`. `excluded`: why that host is; empty: it is not."""

    status: int
    why: str
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What does that process do, and what has its rank written last? Answered by the supervisor whose `host` it is, by
    no other, and by no older one. The fields are those of the rank's WatchRequest."""

    number: int
    rank: int
    pid: int
    host: str
    started: int
    offer: EvidenceOffer


ToHost = HostWelcome | StartRanks | HaltRanks | GroupEnded | HostHeartbeat | ProbeRequest
