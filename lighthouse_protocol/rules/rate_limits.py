"""Restart budgets of runs, and limits on the resources that a peer may use.

The restart budget of a run decides whether and when a failed function runs again. The limits per peer prevent a peer
from starving the others. A peer is a host; the limits allow for a thousand managers behind one address. A check takes
constant time, except that all peers are scanned at most once a second while there are too many. A refused request takes
nothing from the limit that it exceeds, and its error names the limit and the remedy. This module does no I/O and reads
no clock.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from lighthouse_protocol.messages.run import RunTerms
from lighthouse_protocol.refusals import LimitReached

# Restart budget: how many times a function that fails in its process runs again, and after what delay.
#
# 1. A run ends when it has more failures within the window than the budget allows.
# 2. The next generation starts at once if the last one made progress. Otherwise (no step and a short life) it waits,
#    and each further failure in a row doubles the wait.
#
# Lost processes do not count: their supervisor has its own budget.

MAX_DELAY_S = 30.0
PROGRESS_AFTER_S = 10.0  # a generation this old has made progress, even if it reports no steps


class RestartBudget:
    """Restart budget of a run. `failed_at` holds the times of its failures by the caller's clock, oldest first."""

    def __init__(self, failed_at: Iterable[float] = ()) -> None:
        self.failed_at = tuple(failed_at)
        self._fruitless = 0

    def add_failure(self, terms: RunTerms, now: float, *, lasted_s: float, has_stepped: bool) -> float:
        """Record that a generation failed after `lasted_s` seconds. Return the delay in seconds before the next one.

        `has_stepped` means that a rank advanced to a later step in that generation.
        """
        if terms.max_restarts is not None:
            recent = [at for at in self.failed_at if now - at < terms.restart_window_s]
            self.failed_at = (*recent, now)[-terms.max_restarts - 1 :]
        self._fruitless = 0 if has_stepped or lasted_s >= PROGRESS_AFTER_S else self._fruitless + 1
        if not self._fruitless or terms.restart_delay_s is None:
            return 0.0
        return min(MAX_DELAY_S, terms.restart_delay_s * 2.0 ** min(self._fruitless - 1, 60))

    def used_share(self, terms: RunTerms, now: float) -> float:
        """Return the share of the budget used within the window, from 0 to 1, or 0 if restarts are unlimited."""
        if terms.max_restarts is None:
            return 0.0
        recent = sum(now - at < terms.restart_window_s for at in self.failed_at)
        return share_used(recent, terms.max_restarts)

    def why_exhausted(self, terms: RunTerms) -> str:
        """Return a message saying that the budget is exhausted, or an empty string if it is not."""
        if terms.max_restarts is None or len(self.failed_at) <= terms.max_restarts:
            return ""
        return f"max_restarts: {terms.max_restarts} restarts within {terms.restart_window_s:g} s are used up"


def share_used(restarts: int, max_restarts: int) -> float:
    """Return the used share of a budget, from 0 to 1. The first failure uses up a budget of zero restarts."""
    return min(1.0, restarts / max_restarts) if max_restarts else float(restarts > 0)


# Limits per peer.


class TokenBucket:
    """Token bucket that holds up to `at_once` tokens and gains `per_s` tokens per second.

    The caller passes the time, from a monotonic clock.
    """

    __slots__ = ("_at", "_left", "at_once", "per_s")

    def __init__(self, per_s: float, at_once: float) -> None:
        self.per_s = per_s
        self.at_once = at_once
        self._left = at_once
        self._at = 0.0

    def try_take(self, now: float, amount: float = 1.0) -> bool:
        """Take `amount` tokens and return True, or return False if fewer are left."""
        left = self._left + (now - self._at) * self.per_s
        left = min(left, self.at_once)
        if left < amount:
            return False
        self._left, self._at = left - amount, now
        return True

    def is_full(self, now: float) -> bool:
        return self._left + (now - self._at) * self.per_s >= self.at_once


MAX_PEERS = 50_000  # all groups of a few jobs of maximum size, on one host each
SWEEP_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Limit of a token bucket: a burst of `at_once`, then `per_s` per second."""

    per_s: float
    at_once: float

    def times(self, share: float) -> "Rate":
        return Rate(share * self.per_s, share * self.at_once)


class Resource(StrEnum):
    """Limited resources. The values name them in error messages."""

    JOBS = "new jobs"
    RUNS = "new runs"
    REPLICA_IDS = "new replica ids"
    PROCESSES = "new processes of runs"
    RANKS_SHOWN = "rank positions"
    DURABLE_WRITES = "keys written"
    MESSAGES = "messages on streams"
    BYTES = "bytes sent"
    STREAM_MESSAGES = "messages on one stream"
    STREAM_BYTES = "bytes on one stream"


_PER_STREAM = (Resource.STREAM_MESSAGES, Resource.STREAM_BYTES)


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits on the resources of a single peer."""

    open: int = 4096  # concurrent calls and streams
    reads: int = 2  # concurrent expensive reads; further requests wait
    jobs: Rate = Rate(1, 200)
    runs: Rate = Rate(2, 800)
    replica_ids: Rate = Rate(50, 5_000)
    processes: Rate = Rate(100, 30_000)
    ranks_shown: Rate = Rate(8_000, 16_000)  # progress of one rank, in heartbeats of managers
    durable_writes: Rate = Rate(200, 2_000)  # keys of runs
    messages: Rate = Rate(4_000, 200_000)  # over all streams
    bytes: Rate = Rate(8 * 2**20, 64 * 2**20)
    stream_messages: Rate = Rate(200, 70_000)  # the largest group sends its evidence as one message per rank
    stream_bytes: Rate = Rate(512 * 2**10, 16 * 2**20)

    @classmethod
    def for_open(cls, open: int) -> "PeerLimits":
        """Return limits for `open` concurrent calls and streams per peer.

        If `open` exceeds its default, the rates grow in proportion, but the limits of a single stream do not.
        """
        limits = cls(open=open)
        share = max(1.0, open / cls().open)
        grown = {kind.name.lower(): limits.rate(kind).times(share) for kind in Resource if kind not in _PER_STREAM}
        return replace(limits, **grown)

    def rate(self, resource: Resource) -> Rate:
        return getattr(self, resource.name.lower())


class Peer:
    """Counts the open calls and the used resources of one peer, and enforces its limits."""

    __slots__ = ("__weakref__", "_buckets", "_limits", "name", "open")

    def __init__(self, name: str, limits: PeerLimits) -> None:
        self.name = name
        self.open = 0
        self._limits = limits
        self._buckets: dict[Resource, TokenBucket] = {}

    def enter(self) -> None:
        """Count another open call or stream. Raise LimitReached if too many are open."""
        if self.open >= self._limits.open:
            raise LimitReached(
                f"{self.name} has {self.open} calls and streams open; at most {self._limits.open} for each peer: close "
                "some, or raise --max-open-per-peer"
            )
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    def charge(self, resource: Resource, now: float, amount: float = 1.0) -> None:
        """Use `amount` of the peer's allowance of `resource`. Raise LimitReached if less is left."""
        if not self.try_charge(resource, now, amount):
            raise exceeded(self.name, resource, self._buckets[resource])

    def try_charge(self, resource: Resource, now: float, amount: float = 1.0) -> bool:
        """Use `amount` of the peer's allowance of `resource` and return True, or return False if less is left."""
        bucket = self._buckets.get(resource)
        if bucket is None:
            rate = self._limits.rate(resource)
            bucket = self._buckets[resource] = TokenBucket(rate.per_s, rate.at_once)
        return bucket.try_take(now, amount)

    def is_idle(self, now: float) -> bool:
        """Return whether the peer has no open calls and all its buckets are full, so it can be dropped."""
        return self.open == 0 and all(bucket.is_full(now) for bucket in self._buckets.values())


class StreamMeter:
    """Counts the messages and bytes that a peer sends on one stream, and enforces their limits."""

    __slots__ = ("_bytes", "_messages", "_peer")

    def __init__(self, peer: Peer, limits: PeerLimits) -> None:
        self._peer = peer
        self._messages = TokenBucket(limits.stream_messages.per_s, limits.stream_messages.at_once)
        self._bytes = TokenBucket(limits.stream_bytes.per_s, limits.stream_bytes.at_once)

    def charge(self, size: int, now: float) -> None:
        """Count a message of `size` bytes. Raise LimitReached if the stream or the peer exceeds a limit."""
        if not self._messages.try_take(now):
            raise exceeded(self._peer.name, Resource.STREAM_MESSAGES, self._messages)
        if not self._bytes.try_take(now, size):
            raise exceeded(self._peer.name, Resource.STREAM_BYTES, self._bytes)
        self._peer.charge(Resource.MESSAGES, now)
        self._peer.charge(Resource.BYTES, now, size)


class PeerTable:
    """Table of a server's peers. When it is full, it drops idle peers, so its memory use is bounded."""

    def __init__(self, limits: PeerLimits, max_peers: int = MAX_PEERS) -> None:
        self.limits = limits
        self._max_peers = max_peers
        self._peers: dict[str, Peer] = {}
        self._next_sweep_at = -math.inf

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: str, now: float) -> Peer:
        """Return the peer with this name, creating it if needed. Raise LimitReached if too many peers are active."""
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= self._max_peers and now >= self._next_sweep_at:  # the sweep is O(peers)
                self._next_sweep_at = now + SWEEP_EVERY_S
                self._peers = {name: peer for name, peer in self._peers.items() if not peer.is_idle(now)}
            if len(self._peers) >= self._max_peers:
                raise LimitReached(f"{self._max_peers} peers are active already; try again later")
            peer = self._peers[name] = Peer(name, self.limits)
        return peer


def exceeded(peer: str, resource: Resource, bucket: TokenBucket) -> LimitReached:
    return LimitReached(
        f"{resource} by {peer}: at most {bucket.at_once:g} at once and {bucket.per_s:g} a second are taken; "
        "send less, or later"
    )
