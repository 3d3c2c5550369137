"""The snapshots that logs, CLI, page and metrics all show. The field names are those of the wire messages."""

from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.constraints import Count, Offset, Text
from lighthouse_protocol.messages.incident import IncidentSummary
from lighthouse_protocol.messages.progress import DataUse
from lighthouse_protocol.messages.run import RunStatus


class MemberState(StrEnum):
    PARTICIPANT = "participant"  # in the quorum, at work on its step
    HEALING = "healing"  # in the quorum, and receives the state of another group
    JOINED = "joined"  # asks for the next quorum
    STRAGGLER = "straggler"  # alive, not joined, and waited for
    TIMED_OUT = "timed_out"  # alive, missed a join_timeout: not waited for until it joins
    STARTING = "starting"  # its manager is alive; its ranks have not all come yet, or are started again
    DOWN = "down"  # its manager is alive, it has lost ranks: not waited for until it joins
    IDLE = "idle"  # alive, never joined
    EXPIRED = "expired"  # no sign of life for heartbeat_timeout


@dataclass(frozen=True, slots=True)
class HealStatus:
    """A heal of a replica group that goes on, over all its ranks (rules/heal.py): `received` of `total` bytes of the
    state of `step`, from the group `source`. `bytes_per_s`: over the last seconds; `left_s`: at that rate, of the
    slowest rank; None: not known. `still_s`: for so long a rank has received nothing. `text`: all that in words."""

    source: Text
    step: Count
    received: Count
    total: Count | None
    seconds: Offset
    bytes_per_s: Count | None
    left_s: Offset | None
    still_s: Offset
    text: Text


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """`start`: another one for each incarnation (rules/proof.py)."""

    replica_id: str
    start: str
    state: MemberState
    is_participant: bool
    step: int
    world_size: int
    heartbeat_age_s: Offset
    commit_failures: int
    address: str
    store_address: str
    heal: HealStatus | None = None


class RankState(StrEnum):
    """The worst first."""

    BEHIND = "behind"  # furthest behind, while nothing moves
    LOST = "lost"  # its replica group, or its process, is not alive
    WAITING = "waiting"  # in a collective, or for what its script has declared
    RUNNING = "running"
    SPARE = "spare"  # of the present generation of its run


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is. Of a run's rank, `replica_id` is the run and `group_rank` the slot. `phase` is the innermost,
    with `done` of `total` ticks (None: not told); `collective` the newest that it has entered. It may be `limit_s`
    without a move there. `generation`: the last one of its run in which it was active. `at`: the line of a script
    without an Agent."""

    replica_id: str
    group_rank: int
    state: RankState
    step: int
    phase: str
    done: int
    total: int | None
    phase_s: Offset
    collective: str
    is_inside: bool
    waits_for: str
    beat_age_s: Offset
    progress_age_s: Offset
    limit_s: Offset
    host: str
    pid: int
    generation: int | None = None
    at: str = ""


class TimelineKind(StrEnum):
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    KILLED = "killed"
    DRAINED = "drained"
    HEALING = "healing"
    HEALED = "healed"
    QUORUM = "quorum"
    STALL = "stall"
    MOVES = "moves"  # again, after a stall
    INCIDENT = "incident"


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """What happened to `replica_ids` and `more` others."""

    at_unix_s: Offset
    kind: TimelineKind
    replica_ids: tuple[str, ...]
    more: int
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


class StoreKind(StrEnum):
    NONE = "none"
    JOURNAL = "journal"
    ETCD = "etcd"


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Where a lighthouse keeps what must outlive it. `term` grows with each start, or each leadership. `error`: why the
    store does not answer; a lighthouse whose journal cannot be written ends."""

    kind: StoreKind = StoreKind.NONE
    term: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class LighthouseStatus:
    """`now_unix_s`: by the clock of the lighthouse's host."""

    version: str
    uptime_s: Offset
    jobs: tuple[JobStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    insecure: bool = False
    now_unix_s: Offset = 0.0
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
