"""Which ranks are here. One entry a slot, of its newest process, kept after its end: the records that outlive a crash.

A slot is kept for the rank that has it, and for its supervisor, while its stream is open: another process that asks for
it must show the same secret. After a restart of the lighthouse it is kept for NAMES_KEPT_S, in which those that are
there come back. The incarnation of a process is its own for good.

A rank is alive while its stream is open, or for `rank_timeout_s` after its last sign of life. Moments are the
lighthouse's own monotonic clock, stamped on arrival; no clock of another host is compared.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from lighthouse.runs.rules.record import RankRecord
from lighthouse_protocol.messages.run import RankHello, RankId, RunTerms
from lighthouse_protocol.refusals import (
    DuplicateReplica,
    InvalidRequest,
    LighthouseError,
    Superseded,
    UnknownName,
    WrongState,
)
from lighthouse_protocol.rules.proof import digest_of, is_shown

_TWO_JOBS = (
    "if these are two jobs, name one of them: LIGHTHOUSE_RUN_ID, --run-id or torchrun's --rdzv-id, or LIGHTHOUSE_JOB"
)
NAMES_KEPT_S = 5.0  # after a restart of the lighthouse: ranks and supervisors come back within two seconds


@dataclass(slots=True, eq=False)
class Rank:
    """`generation`: the last one in which this process was active. `waits_since`: None unless it is ready. `secret`:
    the digest of what its hello has shown; empty: nothing. `is_successor`: of another process that had this slot, which
    its supervisor need not know of: that may have been started again, too."""

    rank: RankId
    seen_at: float
    lapses_at: float
    attempt: int = 0
    host: str = ""
    pid: int = 0
    generation: int | None = None
    step: int = 0
    phase: str = ""
    is_here: bool = True
    session: int | None = None
    waits_since: float | None = None
    secret: str = ""
    is_successor: bool = False

    @property
    def is_ready(self) -> bool:
        return self.is_here and self.waits_since is not None


class Ranks:
    def __init__(self, rank_timeout_s: float, records: Iterable[RankRecord] = (), now: float = 0.0) -> None:
        """`records`: those of an earlier lighthouse; a rank that was here then has one timeout to come back."""
        self._timeout_s = rank_timeout_s
        self._slots = {r.rank.slot: _restored(r, now, rank_timeout_s) for r in records}
        self._without_stream = {slot for slot, rank in self._slots.items() if rank.is_here}
        self._lapses_from = now + rank_timeout_s  # no rank lapses before
        self._kept_until = now + NAMES_KEPT_S if self._slots else -math.inf
        self._sessions: dict[int, Rank] = {}
        self.ready: dict[int, Rank] = {}

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._slots.values())

    def records(self, wall_offset_s: float) -> tuple[RankRecord, ...]:
        return tuple(_record(rank, wall_offset_s) for rank in self)

    @property
    def is_empty(self) -> bool:
        """No rank is here."""
        return not any(rank.is_here for rank in self)

    @property
    def here(self) -> list[Rank]:
        """O(n)."""
        return [rank for rank in self if rank.is_here]

    def of_slot(self, slot: int) -> Rank | None:
        return self._slots.get(slot)

    def get(self, rank: RankId) -> Rank | None:
        """Only if it is this very process, and alive."""
        found = self._slots.get(rank.slot)
        return found if found is not None and found.is_here and found.rank == rank else None

    def knows(self, rank: RankId) -> bool:
        """It is, or was, the newest process of its slot."""
        found = self._slots.get(rank.slot)
        return found is not None and found.rank == rank

    @property
    def are_connected(self) -> bool:
        """A rank holds a stream."""
        return bool(self._sessions)

    def why_not(self, rank: RankId) -> LighthouseError:
        """Why the message of a process that is not here is refused."""
        found = self._slots.get(rank.slot)
        if found is not None and found.rank != rank:
            return Superseded(f"{rank} has a successor, {found.rank}; end this process")
        return UnknownName(f"{rank} is not connected; enter again")

    def refusal(self, entry: RankHello, terms: RunTerms) -> LighthouseError | None:
        """Why it may not come in. `terms`: those of the ranks that are here; a refusal changes nothing."""
        size = entry.terms.world_size
        if not 0 <= entry.rank.slot < size:
            return InvalidRequest(f"is {entry.rank.slot}; a world of {size} has slots 0 to {size - 1}", field="slot")
        if entry.terms != terms and not self.is_empty:
            return WrongState(
                f"terms: {entry.rank} comes with {entry.terms}, the ranks that are here with {terms}; {_TWO_JOBS}"
            )
        return self._duplicate(entry)

    def impostor(self, entry: RankHello, now: float) -> DuplicateReplica | None:
        """Why the slot, or the incarnation, is kept from it: it has not shown the secret."""
        old = self._slots.get(entry.rank.slot)
        if old is None or not old.secret or is_shown(entry.secret, old.secret):
            return None
        is_kept = old.is_here and (old.session is not None or now < self._kept_until)
        return _taken(old, entry) if is_kept or old.rank == entry.rank else None

    def _duplicate(self, entry: RankHello) -> DuplicateReplica | None:
        """Why another process keeps the slot. A later attempt takes it; if there is no stream, an equal one does, and
        the first one of a supervisor that knows of no other."""
        old = self._slots.get(entry.rank.slot)
        if old is None or not old.is_here or old.rank == entry.rank or entry.attempt > old.attempt:
            return None
        if old.session is None and (entry.attempt == old.attempt or entry.is_first):
            return None
        return _taken(old, entry)

    def of_session(self, session: int) -> Rank | None:
        return self._sessions.get(session)

    def is_of_slot(self, slot: int, secret: str) -> bool:
        """The rank of that slot is here, and has shown that secret."""
        rank = self._slots.get(slot)
        return rank is not None and rank.is_here and is_shown(secret, rank.secret)

    def placed(self, entry: RankHello) -> RankHello:
        """With the slot that a rank of an elastic run gets: the one that it has, the one that it asks for, if no other
        rank has it, else the first one that is free. None is free: as it is. O(n)."""
        if not entry.terms.is_elastic:
            return entry
        own = next((slot for slot, rank in self._slots.items() if rank.rank.incarnation == entry.rank.incarnation), -1)
        taken = {slot for slot, rank in self._slots.items() if rank.is_here and slot != own}
        wishes = (own, entry.rank.slot, *range(entry.terms.world_size))
        slot = next((slot for slot in wishes if slot >= 0 and slot not in taken), entry.rank.slot)
        return replace(entry, rank=replace(entry.rank, slot=slot))

    # -- what happens

    def enter(self, entry: RankHello, session: int | None, now: float) -> Rank:
        """Its process, new or known. A newer session takes the place of an older one."""
        rank = self._slots.get(entry.rank.slot)
        if rank is None or rank.rank != entry.rank:
            self._forget(rank)
            rank = self._slots[entry.rank.slot] = Rank(entry.rank, now, now, is_successor=rank is not None)
        elif rank.session is not None:
            self._sessions.pop(rank.session, None)
        rank.attempt, rank.host, rank.pid, rank.is_here = entry.attempt, entry.host, entry.pid, True
        rank.secret = digest_of(entry.secret)
        rank.step = max(rank.step, entry.step)
        rank.session = session
        self.see(rank, now)
        self._without_stream.discard(entry.rank.slot)
        if session is not None:
            self._sessions[session] = rank
        else:
            self._watch(rank)
        return rank

    def see(self, rank: Rank, now: float) -> None:
        rank.seen_at, rank.lapses_at = now, now + self._timeout_s

    def close(self, rank: Rank, lapses_at: float) -> None:
        """Its stream has ended; it is lost at `lapses_at` unless it comes back."""
        if rank.session is not None:
            self._sessions.pop(rank.session, None)
        rank.session, rank.lapses_at = None, lapses_at
        self._watch(rank)

    def wait(self, rank: Rank, now: float) -> None:
        """It is ready."""
        if rank.waits_since is None:
            rank.waits_since = now
        self.ready[rank.rank.slot] = rank

    def run(self, rank: Rank) -> None:
        """It is ready no more."""
        rank.waits_since = None
        self.ready.pop(rank.rank.slot, None)

    def lose(self, rank: Rank) -> None:
        self._forget(rank)
        rank.is_here, rank.session = False, None

    def lapsed(self, now: float) -> list[Rank]:
        """Those whose time without a stream is over; they are to be lost."""
        if not self._without_stream or now < self._lapses_from:
            return []
        ranks = [self._slots[slot] for slot in sorted(self._without_stream)]
        self._lapses_from = min((rank.lapses_at for rank in ranks if rank.lapses_at > now), default=math.inf)
        return [rank for rank in ranks if rank.lapses_at <= now]

    def next_at(self) -> float | None:
        """A moment at or before the next lapse."""
        return self._lapses_from if self._without_stream and self._lapses_from < math.inf else None

    def shift(self, by_s: float) -> None:
        """The lighthouse was paused: no rank could be heard for that long."""
        for rank in self:
            rank.lapses_at += by_s
            rank.seen_at += by_s
        self._lapses_from += by_s
        self._kept_until += by_s

    def _watch(self, rank: Rank) -> None:
        self._without_stream.add(rank.rank.slot)
        self._lapses_from = min(self._lapses_from, rank.lapses_at)

    def _forget(self, rank: Rank | None) -> None:
        if rank is None:
            return
        self.run(rank)
        self._without_stream.discard(rank.rank.slot)
        if rank.session is not None:
            self._sessions.pop(rank.session, None)


def _taken(old: Rank, entry: RankHello) -> DuplicateReplica:
    return DuplicateReplica(
        f"slot: {entry.rank.slot} is that of pid {old.pid} on {old.host or 'an unnamed host'} "
        f"(attempt {old.attempt}); pid {entry.pid} on {entry.host or 'an unnamed host'} "
        f"(attempt {entry.attempt}) asks for it; give each process of this run its own slot (RANK); {_TWO_JOBS}"
    )


_KEPT = [field.name for field in fields(RankRecord) if field.name != "seen_at"]


def _restored(record: RankRecord, now: float, timeout_s: float) -> Rank:
    kept = {name: getattr(record, name) for name in _KEPT}
    return Rank(**kept, seen_at=now, lapses_at=now + timeout_s)


def _record(rank: Rank, wall_offset_s: float) -> RankRecord:
    kept = {name: getattr(rank, name) for name in _KEPT}
    return RankRecord(**kept, seen_at=rank.seen_at + wall_offset_s)
