"""The snapshots that logs, CLI, page and metrics all show. The field names are those of the wire messages."""

from dataclasses import dataclass
from enum import StrEnum


class MemberState(StrEnum):
    PARTICIPANT = "participant"  # in the quorum, at work on its step
    JOINED = "joined"  # asks for the next quorum
    STRAGGLER = "straggler"  # alive, not joined, and waited for
    MISSED = "missed"  # alive, missed a join_timeout: not waited for until it joins
    DOWN = "down"  # its manager is alive, its ranks are not all there: not waited for until it joins
    IDLE = "idle"  # alive, never joined
    LAPSED = "lapsed"  # no sign of life for heartbeat_timeout


@dataclass(frozen=True, slots=True)
class MemberStatus:
    replica_id: str
    incarnation: str
    state: MemberState
    is_participant: bool
    step: int
    world_size: int
    heartbeat_age_s: float
    commit_failures: int
    address: str
    store_address: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    job: str
    quorum_id: int
    quorum_age_s: float
    verdict: str
    explanation: str
    quorums_formed: int
    rounds: int
    members: tuple[MemberStatus, ...]
    phase: str = "none"
    sessions: int = 0
    recalls: int = 0
    revokes: int = 0


@dataclass(frozen=True, slots=True)
class LighthouseStatus:
    version: str
    uptime_s: float
    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    version: str
    uptime_s: float
    replica_id: str
    incarnation: str
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
