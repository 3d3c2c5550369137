"""What one peer may hold and use, so that no peer starves the others. No I/O.

A peer is a host: a thousand managers behind one address are one peer, and the limits leave room for these. Each check
is O(1), but for a look at all peers, once a second at most, while they are too many. A refusal takes nothing, and names
the limit and the remedy.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.token_bucket import TokenBucket

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
