"""What one peer may hold and use, so that no peer starves the others. No I/O.

A peer is a host: a thousand managers behind one address are one peer, and the limits leave room for these. Each check
is O(1), but for a look at all peers, once a second at most, while they are too many. A refusal takes nothing, and names
the limit and the remedy.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from lighthouse_protocol.messages.run import RunTerms
from lighthouse_protocol.refusals import LimitReached

# -- restart budget -----------------------------------------------------------
#
# How often a function that fails in its process is run again, and how long that waits. No I/O, no clock.
#
# 1. More failures within the window than the budget has are the end of the run.
# 2. After a generation that got somewhere, the next one begins at once. After one that got nowhere (no step, and over
#    soon) it waits, and twice as long each time in a row.
#
# Processes that die are not counted: their supervisor has a budget of its own.

MAX_DELAY_S = 30.0
GETS_SOMEWHERE_S = 10.0
"""A generation that lasts for so long has got somewhere, also one that tells no steps."""


class RestartBudget:
    """`failed_at`: when the function failed, the newest last. Moments are of one clock of the caller's."""

    def __init__(self, failed_at: Iterable[float] = ()) -> None:
        self.failed_at = tuple(failed_at)
        self._in_vain = 0

    def fail(self, terms: RunTerms, now: float, *, lasted_s: float, has_stepped: bool) -> float:
        """A generation has failed. Returns after how many seconds the next one may begin."""
        if terms.max_restarts is not None:
            recent = [at for at in self.failed_at if now - at < terms.restart_window_s]
            self.failed_at = (*recent, now)[-terms.max_restarts - 1 :]
        self._in_vain = 0 if has_stepped or lasted_s >= GETS_SOMEWHERE_S else self._in_vain + 1
        if not self._in_vain or terms.restart_delay_s is None:
            return 0.0
        return min(MAX_DELAY_S, terms.restart_delay_s * 2.0 ** min(self._in_vain - 1, 60))

    def used(self, terms: RunTerms, now: float) -> float:
        """How much of it, at that moment: 0 none, 1 all."""
        if terms.max_restarts is None:
            return 0.0
        recent = sum(now - at < terms.restart_window_s for at in self.failed_at)
        return share_used(recent, terms.max_restarts)

    def why_exhausted(self, terms: RunTerms) -> str:
        """Why there is no further restart; empty: there is one."""
        if terms.max_restarts is None or len(self.failed_at) <= terms.max_restarts:
            return ""
        return f"max_restarts: {terms.max_restarts} restarts within {terms.restart_window_s:g} s are used up"


def share_used(restarts: int, max_restarts: int) -> float:
    """A budget without restarts is used up by the first failure, and not before."""
    return min(1.0, restarts / max_restarts) if max_restarts else float(restarts > 0)


# -- token bucket -------------------------------------------------------------
#
# How much of something may be used: so much at once, and so much a second after that. No I/O.


class TokenBucket:
    """`now` is any clock that does not go back."""

    __slots__ = ("_at", "_left", "at_once", "per_s")

    def __init__(self, per_s: float, at_once: float) -> None:
        self.per_s = per_s
        self.at_once = at_once
        self._left = at_once
        self._at = 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there was so much left; else nothing is taken."""
        left = self._left + (now - self._at) * self.per_s
        left = min(left, self.at_once)
        if left < amount:
            return False
        self._left, self._at = left - amount, now
        return True

    def is_full(self, now: float) -> bool:
        return self._left + (now - self._at) * self.per_s >= self.at_once


MAX_PEERS = 50_000  # the groups of a few jobs of the largest size, a host each
SWEPT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """`at_once`, and `per_s` after that."""

    per_s: float
    at_once: float

    def times(self, share: float) -> "Rate":
        return Rate(share * self.per_s, share * self.at_once)


class Resource(StrEnum):
    """What is counted, as a refusal names it."""

    JOBS = "new jobs"
    RUNS = "new runs"
    REPLICA_IDS = "new replica ids"
    PROCESSES = "new processes of runs"
    RANKS_SHOWN = "places of ranks"
    DURABLE_WRITES = "keys written"
    MESSAGES = "messages on streams"
    BYTES = "bytes sent"
    STREAM_MESSAGES = "messages on one stream"
    STREAM_BYTES = "bytes on one stream"


_OF_ONE_STREAM = (Resource.STREAM_MESSAGES, Resource.STREAM_BYTES)


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """`open`: calls and streams at once. `reads`: answers that cost much, made at once; the others wait."""

    open: int = 4096
    reads: int = 2
    jobs: Rate = Rate(1, 200)
    runs: Rate = Rate(2, 800)
    replica_ids: Rate = Rate(50, 5_000)
    processes: Rate = Rate(100, 30_000)
    ranks_shown: Rate = Rate(8_000, 16_000)
    durable_writes: Rate = Rate(200, 2_000)
    messages: Rate = Rate(4_000, 200_000)
    bytes: Rate = Rate(8 * 2**20, 64 * 2**20)
    stream_messages: Rate = Rate(200, 70_000)  # the evidence of the largest group is one message a rank
    stream_bytes: Rate = Rate(512 * 2**10, 16 * 2**20)

    @classmethod
    def of_managers(cls, open: int) -> "PeerLimits":
        """Where so many calls and streams of one peer may be open at once: more than by default, if more managers share
        an address, and then they may send as much more."""
        limits = cls(open=open)
        share = max(1.0, open / cls().open)
        grown = {kind.name.lower(): limits.rate(kind).times(share) for kind in Resource if kind not in _OF_ONE_STREAM}
        return replace(limits, **grown)

    def rate(self, resource: Resource) -> Rate:
        return getattr(self, resource.name.lower())


class Peer:
    """What one peer holds and has used."""

    __slots__ = ("__weakref__", "_buckets", "_limits", "name", "open")

    def __init__(self, name: str, limits: PeerLimits) -> None:
        self.name = name
        self.open = 0
        self._limits = limits
        self._buckets: dict[Resource, TokenBucket] = {}

    def enter(self) -> None:
        """One more call or stream is open. Raises LimitReached."""
        if self.open >= self._limits.open:
            raise LimitReached(
                f"{self.name} has {self.open} calls and streams open; at most {self._limits.open} for each peer: close "
                "some, or raise --max-open-per-peer"
            )
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    def take(self, resource: Resource, now: float, amount: float = 1.0) -> None:
        """Raises LimitReached."""
        if not self.may_take(resource, now, amount):
            raise exceeded(self.name, resource, self._buckets[resource])

    def may_take(self, resource: Resource, now: float, amount: float = 1.0) -> bool:
        """Takes it if there is so much left."""
        bucket = self._buckets.get(resource)
        if bucket is None:
            rate = self._limits.rate(resource)
            bucket = self._buckets[resource] = TokenBucket(rate.per_s, rate.at_once)
        return bucket.take(now, amount)

    def is_idle(self, now: float) -> bool:
        """It holds nothing, and forgetting it gives it nothing."""
        return self.open == 0 and all(bucket.is_full(now) for bucket in self._buckets.values())


class StreamMeter:
    """What one stream of a peer has sent."""

    __slots__ = ("_bytes", "_messages", "_peer")

    def __init__(self, peer: Peer, limits: PeerLimits) -> None:
        self._peer = peer
        self._messages = TokenBucket(limits.stream_messages.per_s, limits.stream_messages.at_once)
        self._bytes = TokenBucket(limits.stream_bytes.per_s, limits.stream_bytes.at_once)

    def take(self, size: int, now: float) -> None:
        """One message of so many bytes. Raises LimitReached."""
        if not self._messages.take(now):
            raise exceeded(self._peer.name, Resource.STREAM_MESSAGES, self._messages)
        if not self._bytes.take(now, size):
            raise exceeded(self._peer.name, Resource.STREAM_BYTES, self._bytes)
        self._peer.take(Resource.MESSAGES, now)
        self._peer.take(Resource.BYTES, now, size)


class PeerTable:
    """The peers of a server. Those that hold nothing are forgotten, so that ever new ones cost nothing either."""

    def __init__(self, limits: PeerLimits, max_peers: int = MAX_PEERS) -> None:
        self.limits = limits
        self._max_peers = max_peers
        self._peers: dict[str, Peer] = {}
        self._next_sweep_at = -math.inf

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: str, now: float) -> Peer:
        """Raises LimitReached where too many peers hold something."""
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= self._max_peers and now >= self._next_sweep_at:  # it looks at all of them
                self._next_sweep_at = now + SWEPT_EVERY_S
                self._peers = {name: peer for name, peer in self._peers.items() if not peer.is_idle(now)}
            if len(self._peers) >= self._max_peers:
                raise LimitReached(f"{self._max_peers} peers hold something here already; try again later")
            peer = self._peers[name] = Peer(name, self.limits)
        return peer


def exceeded(peer: str, resource: Resource, bucket: TokenBucket) -> LimitReached:
    return LimitReached(
        f"{resource} by {peer}: at most {bucket.at_once:g} at once and {bucket.per_s:g} a second are taken; "
        "send less, or later"
    )
