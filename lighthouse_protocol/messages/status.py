"""Status of the lighthouse and managers, for logs, CLI, dashboard and metrics. Fields are named as in protobuf."""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.constraints import Count, Offset, Reason, Text
from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_protocol.messages.incident import IncidentSummary
from lighthouse_protocol.messages.progress import DataUse, RankPlace
from lighthouse_protocol.messages.run import RunStatus


class MemberState(StrEnum):
    PARTICIPANT = "participant"  # in the quorum, working on a step
    HEALING = "healing"  # in the quorum, receiving another group's state
    JOINED = "joined"  # waits for the next quorum
    STRAGGLER = "straggler"  # alive but not joined; the others wait for it
    TIMED_OUT = "timed_out"  # alive but missed a join_timeout; the others do not wait until it joins
    STARTING = "starting"  # manager alive; some ranks have not connected yet, or are restarting
    DOWN = "down"  # manager alive, ranks lost; the others do not wait until it joins
    IDLE = "idle"  # alive, never joined
    EXPIRED = "expired"  # no sign of life for heartbeat_timeout


@dataclass(frozen=True, slots=True)
class HealStatus:
    """Current heal of a replica group, summed over its ranks (rules/heal.py)."""

    source: Text  # replica group that sends the state
    step: Count  # step of the state
    received: Count  # bytes
    total: Count | None  # bytes, None if unknown
    seconds: Offset
    bytes_per_s: Count | None  # over the last few seconds, None if unknown
    left_s: Offset | None  # time left for the slowest rank at its current rate, None if unknown
    still_s: Offset  # longest time without data among the healing ranks
    text: Text  # this status in words


@dataclass(frozen=True, slots=True)
class PreemptionStatus:
    """Notice that a host of a replica group will be taken away."""

    source: Text
    reason: Reason
    host: Reason
    left_s: Offset | None  # None if unknown
    is_advice: bool  # the host is only likely to be taken away

    def __str__(self) -> str:
        when = "soon" if self.left_s is None else f"in {self.left_s:.0f} s"
        return f"ends {'perhaps' if self.is_advice else when}: {self.reason} ({self.source})"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Status of a replica group, as known to the lighthouse."""

    replica_id: str
    start: str  # distinguishes incarnations without revealing them (rules/access.py)
    state: MemberState
    is_participant: bool
    step: int
    world_size: int
    heartbeat_age_s: Offset
    commit_failures: int
    address: str
    store_address: str
    heal: HealStatus | None = None
    preemption: PreemptionStatus | None = None  # None if there is no notice


class TimelineKind(StrEnum):
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    KILLED = "killed"
    DRAINED = "drained"
    NOTICE = "notice"  # a host will be taken away
    HEALING = "healing"
    HEALED = "healed"
    QUORUM = "quorum"
    STALL = "stall"
    MOVES = "moves"  # progress resumed after a stall
    INCIDENT = "incident"


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An event in a job's timeline, for display."""

    at_unix_s: Offset
    kind: TimelineKind
    replica_ids: tuple[str, ...]  # the first groups affected
    more: int  # number of further groups affected
    text: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    job: str
    quorum_id: int
    quorum_age_s: Offset
    verdict: str
    explanation: str
    quorums_formed: int
    rounds: int
    members: tuple[MemberStatus, ...]
    phase: str = "none"
    sessions: int = 0
    recalls: int = 0
    revokes: int = 0
    ranks: tuple[RankPlace, ...] = ()
    stall: str = ""
    stall_s: Offset = 0.0
    timeline: tuple[TimelineEntry, ...] = ()
    incidents: tuple[IncidentSummary, ...] = ()
    data: DataUse | None = None
    ended_step: int | None = None
    discards: int = 0  # discarded steps, summed over the groups


class StoreKind(StrEnum):
    NONE = "none"
    JOURNAL = "journal"
    ETCD = "etcd"


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """State of a lighthouse's durable store.

    `error` is set only for etcd, because a lighthouse that cannot write its journal exits.
    """

    kind: StoreKind = StoreKind.NONE
    term: int = 0  # grows with each start or, on etcd, with each election
    error: str = ""  # why the store does not answer


@dataclass(frozen=True, slots=True)
class LighthouseStatus:
    version: str
    uptime_s: Offset
    jobs: tuple[JobStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    insecure: bool = False
    now_unix_s: Offset = 0.0  # by the clock of the lighthouse's host
    store: StoreStatus = StoreStatus()
    http_port: Count = 0


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    version: str
    uptime_s: Offset
    replica_id: str
    start: str
    job: str
    group_world_size: int
    address: str
    store_address: str
    lighthouse: str
    lighthouse_reachable: bool
    lighthouse_error: str
    quorum_id: int
    step: int
    phase: str
    ranks_waiting: tuple[int, ...]
    commits: int
    discards: int
    mode: str = "none"
    grants: int = 0
    kept: tuple[KeptState, ...] = ()

    @property
    def kept_step(self) -> int:
        """Lowest step among the states that the ranks keep in memory, or 0 if any rank keeps none."""
        return min((each.step for each in self.kept), default=0) if len(self.kept) == self.group_world_size else 0
