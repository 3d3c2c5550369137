"""Rules that decide which pieces of a state are requested from which of several sources.

This module does no I/O, reads no clock and does not import torch.

1. A state is a list of pieces. One source is the *lead*. Its checksums define the content of every piece, and
   pieces with other content are discarded. So the result is always the lead's state, never a mixture.
2. A free source gets the next unassigned pieces. Their size is proportional to the source's rate in bytes per second,
   so that all sources finish at the same time. A source's first request is for FIRST_BYTES, to measure the rate. A
   source that is much slower than the fastest one gets none of the last pieces.
3. Once all pieces are assigned, a source is disconnected if a free source would deliver its next piece more than
   SLOW_FACTOR times faster. The free source then gets the remaining pieces of the slow one.
4. If a connection breaks, its remaining pieces are also reassigned. The source is tried again after a pause, and
   rejected after TRIES consecutive attempts that yield no piece. A source is rejected immediately if it refuses, sends
   unusable data, or sends nothing for `silence_s`. The last remaining source may be silent until the deadline.
5. A piece that differs from the lead's is requested from the lead, because some tensors, such as buffers, differ
   between groups. If more than DIFFERING_SHARE of a source's bytes differ, it holds another state and is rejected.
6. If the lead is lost before all its checksums have arrived, or while a piece is available only from the lead, another
   source becomes the lead. Received pieces that are equal to the new lead's are kept.
7. With `leads_alone`, all pieces are requested from the lead. Other sources get only those that the lead fails to send.
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

TRIES = 4
FIRST_PAUSE_S = 0.05
"""Pause in seconds before the second attempt. It doubles with each further attempt."""
FIRST_BYTES = 8 * 2**20
STRIPE_BYTES = 32 * 2**20
"""Maximum bytes of a request, unless a single piece is larger."""
MAX_RANGES = 64
"""Maximum number of contiguous ranges in a request."""
SLOW_FACTOR = 2.0
SLOW_S = 0.5
"""Extra time in seconds that a piece may take, in addition to what SLOW_FACTOR allows."""
ASSUMED_RATE = 2**20
"""Assumed rate in bytes per second of a free source that has not sent anything yet."""
RATE_OVER_BYTES = 32 * 2**20
"""Half-life of a measured rate: after this many more bytes, a measurement counts half."""
DIFFERING_SHARE = 0.1
MAX_DIFFERING_BYTES = 16 * 2**20
"""Number of bytes that may always differ, even if they exceed DIFFERING_SHARE."""


@dataclass(frozen=True, slots=True)
class LeadChosen:
    """The source has become the lead, so its checksums define the state.

    A ChecksumArrived event follows for each piece, in order.
    """

    source: str


@dataclass(frozen=True, slots=True)
class ChecksumArrived:
    checksum: bytes


@dataclass(frozen=True, slots=True)
class LeadLost:
    pass


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """The next of the pieces requested from the source has arrived undamaged."""

    source: str
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection to the source has broken, or could not be opened."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The source has refused the request, sent unusable data, or sent nothing for too long."""

    source: str
    reason: str


Event = LeadChosen | ChecksumArrived | LeadLost | PieceArrived | ConnectionLost | Refused


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """Request these pieces from the source, in this order."""

    source: str
    pieces: tuple[int, ...]
    silence_s: float  # maximum time without data


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to the source. Other sources get its remaining pieces."""

    source: str


@dataclass(frozen=True, slots=True)
class SourceRejected:
    """Stop requesting pieces from the source."""

    source: str
    reason: str


Effect = PieceRequest | Disconnect | SourceRejected


@dataclass(slots=True, eq=False)
class _Source:
    name: str
    requested: list[int] = field(default_factory=list[int])
    """Requested pieces that have not arrived yet, in reverse order: the next piece is the last in the list."""
    since: float = 0.0
    """Time at which the next piece began to arrive."""
    is_busy: bool = False
    """True until all requested pieces have arrived or the connection has closed."""
    is_timed: bool = False
    """True if the next piece measures the rate. False for a request's first piece, which includes the response time."""
    tries: int = 0
    free_at: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    first_rate: float | None = None
    """Rate of a request's first piece, in bytes per second, including the response time."""
    received: int = 0
    differing: int = 0
    """Number of received bytes that differ from the lead's."""
    reason: str | None = None

    @property
    def rate(self) -> float | None:
        return self.bytes / self.seconds if self.seconds > 0 else self.first_rate

    def is_free(self, now: float) -> bool:
        return not self.is_busy and now >= self.free_at


class StripePlan:
    """Decides which pieces to request from which source, given the sizes of the pieces in bytes."""

    def __init__(
        self,
        sizes: Sequence[int],
        sources: Sequence[str],
        *,
        deadline: float,
        silence_s: float,
        leads_alone: bool = False,
    ) -> None:
        self._sizes = sizes
        self._sources = {name: _Source(name) for name in sources}
        self._deadline = deadline
        self._silence_s = silence_s
        self._leads_alone = leads_alone
        self._lead: _Source | None = None
        self._checksums: list[bytes | None] = [None] * len(sizes)
        self._senders: list[_Source | None] = [None] * len(sizes)
        self._expected: list[bytes] = []
        self._equal = 0
        self._unassigned = list(range(len(sizes)))
        self._unassigned_bytes = sum(sizes)
        self._unassigned_of_lead: list[int] = []
        self._only_lead: set[int] = set()
        self._effects: list[Effect] = []
        self.received = 0

    @property
    def is_done(self) -> bool:
        return self._equal == len(self._sizes)

    @property
    def needs_lead(self) -> bool:
        return self._lead is None and (len(self._expected) < len(self._sizes) or bool(self._only_lead))

    @property
    def is_over(self) -> bool:
        return self.is_done or not self._usable()

    @property
    def rejected(self) -> dict[str, str]:
        return {name: source.reason for name, source in self._sources.items() if source.reason is not None}

    @property
    def shares(self) -> dict[str, int]:
        shares = {name: source.received - source.differing for name, source in self._sources.items()}
        return {name: count for name, count in shares.items() if count}

    def next_piece(self, source: str) -> int | None:
        """Return the index of the next piece expected from this source, or None if none is expected."""
        requested = self._sources[source].requested
        return requested[-1] if requested else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case LeadChosen(name):
                self._set_lead(self._sources[name])
            case ChecksumArrived(checksum):
                self._expected.append(checksum)
                self._compare(len(self._expected) - 1)
            case LeadLost():
                self._lead = None
            case PieceArrived(name, checksum):
                self._add_piece(self._sources[name], checksum, now)
            case ConnectionLost(name, reason):
                self._drop_connection(self._sources[name], reason, now)
            case Refused(name, reason):
                self._reject(self._sources[name], reason)
        return self.tick(now)

    def tick(self, now: float) -> list[Effect]:
        if not self.is_done and now < self._deadline:
            self._assign(now)
            self._disconnect_slow(now)
        effects, self._effects = self._effects, []
        return effects

    def deadline(self, now: float) -> float:
        moments = [source.free_at for source in self._usable() if not source.is_busy]
        moments += [at for source in self._sources.values() if (at := self._slow_at(source, now)) is not None]
        return min([at for at in moments if at > now], default=self._deadline)

    # -- events

    def _set_lead(self, lead: _Source) -> None:
        self._lead = lead
        self._expected, self._equal = [], 0
        self._only_lead.clear()
        pieces, self._unassigned_of_lead = self._unassigned_of_lead, []
        for piece in pieces:
            self._unassign(piece)

    def _add_piece(self, source: _Source, checksum: bytes, now: float) -> None:
        if not source.requested:
            return
        piece = source.requested.pop()
        size = self._sizes[piece]
        if source.is_timed:
            kept = 0.5 ** (size / RATE_OVER_BYTES)
            source.bytes = source.bytes * kept + size
            source.seconds = source.seconds * kept + now - source.since
        elif now > source.since:
            source.first_rate = size / (now - source.since)
        source.is_timed, source.since, source.tries = True, now, 0
        source.is_busy = bool(source.requested)
        source.received += size
        self.received += size
        self._checksums[piece], self._senders[piece] = checksum, source
        self._compare(piece)

    def _drop_connection(self, source: _Source, reason: str, now: float) -> None:
        self._unassign_all(source)
        source.is_busy = False
        source.tries += 1
        source.free_at = now + FIRST_PAUSE_S * 2 ** (source.tries - 1)
        if source.tries >= TRIES:
            self._reject(source, f"{reason} ({TRIES} times in a row)")

    def _reject(self, source: _Source, reason: str) -> None:
        if source.reason is not None:
            return
        source.reason = reason
        self._unassign_all(source)
        if self._lead is source:
            self._lead = None
        self._effects.append(SourceRejected(source.name, reason))

    def _unassign_all(self, source: _Source) -> None:
        for piece in source.requested:
            self._unassign(piece)
        source.requested = []

    def _unassign(self, piece: int) -> None:
        if piece in self._only_lead:
            insort(self._unassigned_of_lead, piece)
        else:
            insort(self._unassigned, piece)
            self._unassigned_bytes += self._sizes[piece]

    # -- the lead's checksums

    def _compare(self, piece: int) -> None:
        found, sender = self._checksums[piece], self._senders[piece]
        if found is None or sender is None or piece >= len(self._expected):
            return
        if found == self._expected[piece]:
            self._equal += 1
            self._only_lead.discard(piece)
            return
        self._checksums[piece] = self._senders[piece] = None
        self.received -= self._sizes[piece]
        self._count_differing(sender, self._sizes[piece])
        self._only_lead.add(piece)
        self._unassign(piece)

    def _count_differing(self, sender: _Source, size: int) -> None:
        if sender is self._lead:
            return self._reject(sender, "sends something else than it announces")
        sender.differing += size
        if sender.differing > max(MAX_DIFFERING_BYTES, DIFFERING_SHARE * sender.received):
            lead = self._lead.name if self._lead else "the source before it"
            self._reject(sender, f"holds another state than {lead}")
        return None

    # -- requests

    def _usable(self) -> list[_Source]:
        return [source for source in self._sources.values() if source.reason is None]

    def _free(self, now: float) -> list[_Source]:
        free = [source for source in self._usable() if source.is_free(now)]
        return sorted(free, key=lambda source: -(source.rate or 0.0))

    def _assign(self, now: float) -> None:
        for source in self._free(now):
            if pieces := self._next_pieces(source, now):
                source.requested, source.is_busy = pieces[::-1], True
                source.since, source.is_timed = now, False
                is_last = self._usable() == [source]
                left_s = self._deadline - now
                silence_s = left_s if is_last else min(self._silence_s, left_s)
                self._effects.append(PieceRequest(source.name, tuple(pieces), silence_s))

    def _next_pieces(self, source: _Source, now: float) -> list[int]:
        if source is self._lead and self._unassigned_of_lead:
            return self._pop_pieces(self._unassigned_of_lead, STRIPE_BYTES)
        taken = [] if self._is_for_lead(source, now) else self._next_of_all(source)
        self._unassigned_bytes -= sum(self._sizes[piece] for piece in taken)
        return taken

    def _is_for_lead(self, source: _Source, now: float) -> bool:
        lead = self._lead
        return self._leads_alone and lead is not None and lead is not source and lead.is_free(now)

    def _next_of_all(self, source: _Source) -> list[int]:
        if not self._unassigned:
            return []
        if self._leads_alone:
            return self._pop_pieces(self._unassigned, math.inf)
        left, rates = self._unassigned_bytes, [other.rate for other in self._usable() if other.rate]
        if not rates or source.rate is None:
            new = [other for other in self._usable() if other.rate is None and not other.is_busy]
            return self._pop_pieces(self._unassigned, min(FIRST_BYTES, left / max(1, len(new))))
        if self._sizes[self._unassigned[0]] / source.rate > SLOW_FACTOR * left / max(rates):
            return []
        return self._pop_pieces(self._unassigned, min(STRIPE_BYTES, left * source.rate / sum(rates) / 2))

    def _pop_pieces(self, pool: list[int], wanted: float) -> list[int]:
        """Remove and return the first pieces of the pool: at least one, up to `wanted` bytes and MAX_RANGES ranges."""
        taken: list[int] = []
        size = runs = 0
        while pool and (not taken or size + self._sizes[pool[0]] <= wanted):
            if not taken or pool[0] != taken[-1] + 1:
                runs += 1
            if runs > MAX_RANGES:
                break
            taken.append(pool.pop(0))
            size += self._sizes[taken[-1]]
        return taken

    def _disconnect_slow(self, now: float) -> None:
        for source in self._sources.values():
            at = self._slow_at(source, now)
            if at is not None and now >= at:
                source.bytes, source.seconds = self._sizes[source.requested[-1]], now - source.since
                self._unassign_all(source)
                self._effects.append(Disconnect(source.name))
                self._assign(now)

    def _slow_at(self, source: _Source, now: float) -> float | None:
        """Return the time at which the source counts as slow, or None if no free source could replace it."""
        if not source.requested or source.requested[-1] in self._only_lead:
            return None
        free = next(iter(self._free(now)), None)
        if free is None:
            return None
        return source.since + SLOW_S + SLOW_FACTOR * self._sizes[source.requested[-1]] / (free.rate or ASSUMED_RATE)
