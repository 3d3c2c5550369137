"""Leader election among lighthouses that share a store. This module does no I/O, and callers pass the time.

- One key names the leader. A candidate creates it only if it does not exist, under a lease of the store. The store
  deletes the key when the lease expires.
- The leader may act until 2/3 of the lease's duration have passed on its own clock since it *sent* its last
  answered renewal. The store counts the full duration from that renewal's *arrival*. So the leader stops before
  another can start, provided that the rates of the two clocks differ by less than a factor of 3/2.
- Each action compares the clock with this limit. A timer would fire too late in a process that was suspended.
- Every write is conditional on the key. Clocks only decide whether the lighthouse may *answer*.
- A request without an answer may have been executed. A candidate whose claim is not answered revokes its lease, which
  deletes the key if the claim was executed.
- A candidate gives up if a request is not answered within the lease's duration, so that another can be elected.
- The error of a failed candidacy is shown until a lighthouse leads, even if the store answers later reads, because the
  store may be out of space or refuse writes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from lighthouse_protocol.refusals import NotLeader


@dataclass(frozen=True, slots=True)
class Leader:
    """Content of the key that names the leader."""

    candidate: str  # new for each process
    address: str  # address of its gRPC server
    page: str  # URL of its dashboard
    term: int  # grows with each leader
    ca_pin: str = ""  # pin of its own CA, or empty if another CA signs its certificate


def difference(own: Leader, other: Leader) -> str:
    """Return a warning if the two lighthouses have different CAs (certificate authorities), or an empty string.

    Clients that trust one of the CAs would reject the other lighthouse.
    """
    if own.ca_pin == other.ca_pin:
        return ""
    return (
        f"the leader {other.address} has another CA (pin {other.ca_pin[:12] or 'none'}) than this lighthouse (pin "
        f"{own.ca_pin[:12] or 'none'}): a join string works with only one of them; stop this lighthouse, give it a "
        "copy of the other one's --credentials folder, and start it again"
    )


def dump(leader: Leader) -> bytes:
    return json.dumps(asdict(leader), separators=(",", ":")).encode()


def parse(raw: bytes) -> Leader:
    """Parse the output of dump(), ignoring unknown fields. Raise ValueError if `raw` is malformed."""
    try:
        document = json.loads(raw)
        return Leader(
            str(document["candidate"]),
            str(document["address"]),
            str(document["page"]),
            int(document["term"]),
            str(document.get("ca_pin", "")),
        )
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{raw[:80]!r} is not the record of a leader") from e


# -- events: answers to a candidate's requests, matched by `number`


@dataclass(frozen=True, slots=True)
class LeaderRead:
    """Answer to ReadLeader: the content of the leader's key, or None if the key does not exist."""

    number: int
    leader: Leader | None


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    number: int
    lease: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ClaimWon:
    """Answer to Claim: this candidate has created the leader's key, at `revision` of the store."""

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
    """Answer to RenewLease: the lease has expired in the store."""

    number: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request failed, but the store may have executed it."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """A record cannot be written, because another lighthouse is the leader or the store rejects the record."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resigned:
    """This process is about to exit, so the candidate must give up its leadership."""


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

# -- effects: requests and notifications


@dataclass(frozen=True, slots=True)
class ReadLeader:
    number: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    number: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Request to become the leader: unless the leader's key exists, create it under `lease` and increment the term."""

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
    """Request to revoke a lease. It gets no answer."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeadershipBegan:
    """This lighthouse has become the leader and loaded all records. It created the leader's key at `revision`."""

    term: int
    revision: int


@dataclass(frozen=True, slots=True)
class LeadershipEnded:
    """This lighthouse has stopped being the leader, and must not answer calls."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """The leader has changed. `leader` is None if no other lighthouse is known to lead."""

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


FENCE_SHARE = 2 / 3
RENEWALS_PER_LEASE = 6
LOOKS_PER_LEASE = 12
# Maximum duration of one request: an endpoint that does not answer must leave time to try another.
REQUESTS_PER_LEASE = 4
MAX_RENEWALS_OPEN = 64


class Role(StrEnum):
    FOLLOWING = "follower"
    CAMPAIGNING = "candidate"
    LEADING = "leader"


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    name: str  # unique to this process
    ttl_s: float = 3.0  # duration of the lease

    @property
    def request_timeout_s(self) -> float:
        return self.ttl_s / REQUESTS_PER_LEASE


@dataclass(frozen=True, slots=True)
class CandidateStatus:
    role: Role
    term: int
    leader: Leader | None
    store_error: str  # why the newest request or candidacy failed; empty while a lighthouse is known to lead
    store_silent_s: float  # time since a lighthouse was last known to lead


class Candidate:
    def __init__(self, config: CandidateConfig, now: float) -> None:
        self._config = config
        self._role = Role.FOLLOWING
        self._leader: Leader | None = None
        self._term = 0
        self._number = 0
        self._asked: int | None = None  # number of the request that the next step waits for
        self._asked_at = 0.0
        self._revision = 0
        self._has_claimed = False
        self._lease: int | None = None
        self._ended_lease: int | None = None
        self._renewals: dict[int, float] = {}  # when each was sent, by number
        self._fence_at = 0.0
        self._next_at = now
        self._store_error = ""
        self._answered_at = now
        self._is_over = False

    def may_act(self, now: float) -> bool:
        """Return whether this lighthouse is the leader and may answer calls now."""
        return self._role is Role.LEADING and now < self._fence_at

    def refusal(self, now: float) -> NotLeader | None:
        """Return the error with which to refuse calls now, or None if this lighthouse may act."""
        if self.may_act(now):
            return None
        if self._is_over:
            return NotLeader("this lighthouse is shutting down; another one takes over")
        leader = self._leader
        if leader is not None:
            return NotLeader(f"this lighthouse is a follower; the leader is {leader.address}", leader=leader.address)
        if self._store_error:
            return NotLeader(
                f"store_unavailable: {self._store_error}, for {now - self._answered_at:.0f} s; no lighthouse can lead "
                "until the store answers, and quorums continue under their leases"
            )
        return NotLeader("no lighthouse leads at the moment; an election is running")

    def status(self, now: float) -> CandidateStatus:
        role = self._role if self._role is not Role.LEADING or self.may_act(now) else Role.FOLLOWING
        return CandidateStatus(role, self._term, self._leader, self._store_error, now - self._answered_at)

    def deadline(self) -> float | None:
        if self._is_over:
            return None
        return min(self._next_at, self._fence_at) if self._lease is not None else self._next_at

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        if self._is_over:
            return ()
        ended = self._check_fence(now)
        return (*ended, *self._handle(event, now))

    def tick(self, now: float) -> Sequence[Effect]:
        if self._is_over:
            return ()
        ended = self._check_fence(now)
        if ended or now < self._next_at:
            return ended
        if self._lease is not None:
            if self._asked is not None and now - self._asked_at >= self._config.ttl_s:
                return self._failed(self._asked, f"no answer from the store within {self._config.ttl_s:g} s", now)
            return self._renew(self._lease, now)
        self._next_at = now + self._config.ttl_s / LOOKS_PER_LEASE
        if self._asked is not None and now - self._asked_at < self._config.ttl_s:
            return ()
        return (ReadLeader(self._ask(now)),)

    def _handle(self, event: Event, now: float) -> Sequence[Effect]:
        match event:
            case RequestFailed(number, reason):
                return self._failed(number, reason, now)
            case WriteRefused(reason):
                return self._step_down(reason, now)
            case Resigned():
                effects = self._step_down("this lighthouse is shutting down", now)
                self._is_over = True
                return effects
            case LeaseRenewed(number, ttl_s):
                if self._role is Role.LEADING:
                    self._clear_error(now)
                sent_at = self._renewals.pop(number, None)
                if sent_at is not None:
                    self._fence_at = max(self._fence_at, sent_at + FENCE_SHARE * ttl_s)
                return ()
            case LeaseEnded(number):
                return self._step_down("its lease in the store expired", now) if number in self._renewals else ()
            case _:
                if event.number != self._asked:
                    return ()
                self._asked = None
                return self._proceed(event, now)

    def _proceed(
        self, event: LeaderRead | LeaseGranted | ClaimWon | ClaimLost | RecordsLoaded, now: float
    ) -> Sequence[Effect]:
        match event:
            case LeaderRead(_, None):
                return (*self._set_leader(None), GrantLease(self._ask(now), self._config.ttl_s))
            case LeaderRead(_, leader):
                if leader is None or leader.candidate != self._config.name:
                    self._clear_error(now)
                    return self._set_leader(leader)
                # The key is left from an earlier leadership of this candidate: the revocation has not arrived, or a
                # late renewal has prolonged the lease.
                again = (RevokeLease(self._ended_lease),) if self._ended_lease is not None else ()
                return (*self._set_leader(None), *again)
            case LeaseGranted(_, lease, ttl_s):
                self._role, self._lease, self._has_claimed = Role.CAMPAIGNING, lease, False
                self._fence_at = self._asked_at + FENCE_SHARE * ttl_s
                self._next_at = now + ttl_s / RENEWALS_PER_LEASE
                if now >= self._fence_at:
                    return self._step_down("the lease came too late", now)
                return (Claim(self._ask(now), lease),)
            case ClaimWon(_, revision, term):
                self._revision, self._term, self._has_claimed = revision, term, True
                return (*self._set_leader(None), LoadRecords(self._ask(now)))
            case ClaimLost(_, leader):
                self._clear_error(now)
                return (*self._step_down("another lighthouse was first", now), *self._set_leader(leader))
            case RecordsLoaded():
                self._clear_error(now)
                self._role = Role.LEADING
                return (LeadershipBegan(self._term, self._revision),)

    def _ask(self, now: float) -> int:
        self._number += 1
        self._asked, self._asked_at = self._number, now
        return self._number

    def _clear_error(self, now: float) -> None:
        self._store_error, self._answered_at = "", now

    def _set_leader(self, leader: Leader | None) -> Sequence[Effect]:
        if leader == self._leader:
            return ()
        self._leader = leader
        return (LeaderChanged(leader),)

    def _renew(self, lease: int, now: float) -> Sequence[Effect]:
        self._number += 1
        self._renewals[self._number] = now
        while len(self._renewals) > MAX_RENEWALS_OPEN:
            del self._renewals[next(iter(self._renewals))]
        self._next_at = now + self._config.ttl_s / RENEWALS_PER_LEASE
        return (RenewLease(self._number, lease),)

    def _failed(self, number: int, reason: str, now: float) -> Sequence[Effect]:
        self._store_error = reason
        if number == self._asked:
            self._asked = None
            if self._lease is not None:
                effects = self._step_down(reason, now)
                if self._has_claimed:  # if the records cannot be read, leave the next attempt to another
                    self._next_at = now + self._config.ttl_s
                return effects
            # The last known leader may have changed in the meantime.
            return self._set_leader(None) if now - self._answered_at >= self._config.ttl_s else ()
        self._renewals.pop(number, None)
        return ()

    def _check_fence(self, now: float) -> Sequence[Effect]:
        if self._lease is None or now < self._fence_at:
            return ()
        why = f"; {self._store_error}" if self._store_error else ""
        return self._step_down(f"its lease was not renewed for {FENCE_SHARE:.0%} of its time{why}", now)

    def _step_down(self, reason: str, now: float) -> Sequence[Effect]:
        """Become a follower. Revoke the lease, so that another leader can be elected before the lease expires."""
        lease, self._lease = self._lease, None
        self._ended_lease = lease if lease is not None else self._ended_lease
        was_leading = self._role is Role.LEADING
        self._role, self._asked = Role.FOLLOWING, None
        self._renewals.clear()
        self._next_at = now + self._config.ttl_s / LOOKS_PER_LEASE
        ended = (LeadershipEnded(reason),) if was_leading else ()
        return (*ended, RevokeLease(lease)) if lease is not None else ended
