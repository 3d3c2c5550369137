"""What a candidate is told, and what it wants done. A `number` names a request; its answer carries the same one."""

from dataclasses import dataclass

from lighthouse.etcd.rules.leader import Leader

# -- events


@dataclass(frozen=True, slots=True)
class LeaderRead:
    """The leader's key as it is; None: there is none."""

    number: int
    leader: Leader | None


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    number: int
    lease: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ClaimWon:
    """The key is this candidate's, since `revision` of the store."""

    number: int
    revision: int
    term: int


@dataclass(frozen=True, slots=True)
class ClaimLost:
    number: int
    leader: Leader | None


@dataclass(frozen=True, slots=True)
class RecordsLoaded:
    number: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    number: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The store does not know it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """It may have been done."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """A record was not written, for good: the key is no longer this candidate's, or the store does not take it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resigned:
    """The process is about to end."""


Event = (
    LeaderRead
    | LeaseGranted
    | ClaimWon
    | ClaimLost
    | RecordsLoaded
    | LeaseRenewed
    | LeaseEnded
    | RequestFailed
    | WriteRefused
    | Resigned
)

# -- effects


@dataclass(frozen=True, slots=True)
class ReadLeader:
    number: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    number: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Write the leader's key under `lease`, if there is none, and count the term."""

    number: int
    lease: int


@dataclass(frozen=True, slots=True)
class LoadRecords:
    number: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    number: int
    lease: int


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """No answer is waited for."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeadershipBegan:
    """All records are loaded. Every write is guarded by `revision`."""

    term: int
    revision: int


@dataclass(frozen=True, slots=True)
class LeadershipEnded:
    """Nothing may leave this lighthouse any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Another lighthouse leads, or none that is known of."""

    leader: Leader | None


Effect = (
    ReadLeader
    | GrantLease
    | Claim
    | LoadRecords
    | RenewLease
    | RevokeLease
    | LeadershipBegan
    | LeadershipEnded
    | LeaderChanged
)
