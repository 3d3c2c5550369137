"""The generations of one run: its ranks come and go, are active or spare, and a new generation forms of those left.

1. Numbers are given out here alone, are durable before a rank is told, and never repeat (counters.py).
2. A generation stands until one of its active ranks is lost or fails: then it is broken, the others are interrupted
   and report ready. A rank may also report ready by itself. The loss of a spare breaks nothing (generation.py).
3. When the next generation forms, and of which ranks: formation.py, assignment.py. All its ranks are told at once.
4. A rank that comes while a generation stands becomes its spare and is told so at once. If the generation would be
   larger with it, the generation is broken for that, which is no incident.
5. A rank of the present generation that has not heard of it is told again. A rank that holds another number is told
   that its generation is over, so no rank waits for a past one.
6. Too few ranks for too long, `max_iterations` generations, or more failures of the function than the budget has: the
   run is to be stopped (`settle`).
7. A generation that a rank has finished is not broken for a newcomer. When all its ranks have finished, the run is
   completed. A rank of an elastic run may close it: then it is completed for all, finished or not.

Everything follows from what ranks report that they hold. An event that changes nothing costs O(1), a generation
O(n log n) once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from lighthouse.job import events
from lighthouse.job.events import IncidentChanged, RunVerdict
from lighthouse.job.presence import CLOSINGS_HELD_S
from lighthouse.job.records import GenerationState, Rank, RankRecord, RestartRecord, RunConfig, RunRecord
from lighthouse_protocol.limits import MAX_LEARNED_GENERATION
from lighthouse_protocol.messages.run import (
    CloseReport,
    FailureReport,
    FinishReport,
    Generation,
    ProcessLost,
    RankHeartbeat,
    RankHello,
    RankId,
    ReadyReport,
    RunCounters,
    RunTerms,
)
from lighthouse_protocol.refusals import (
    DuplicateReplica,
    InvalidRequest,
    LighthouseError,
    Superseded,
    UnknownName,
    WrongState,
)
from lighthouse_protocol.rules.access import digest_of, is_shown
from lighthouse_protocol.rules.rate_limits import RestartBudget
from lighthouse_protocol.rules.stall import GroupProgress, Process

# -- assignment ---------------------------------------------------------------
#
# Which ranks are active, at which place, and which are spares: one function of (members, previous assignment, terms).
#
# - As many as the terms allow: at most `active`, a multiple of `divisible_by`, at least `min_active`, or none.
# - An active rank keeps its place, by slot: a restarted process takes its predecessor's. Spares fill the holes, the
#   longest waiting first. If the world shrinks, the highest ranks move into the holes.
# - At the start, when no rank was active, places go by slot.
# - `hosts_together`: a host that misses one of its known slots has no active rank.


@dataclass(frozen=True, slots=True)
class Candidate:
    """`waiting_since` orders the spares. One that is not `is_ready` is not chosen: its host misses it."""

    rank: RankId
    host: str = ""
    is_ready: bool = True
    waiting_since: float = 0.0


def assign(members: Iterable[Candidate], previous: Sequence[int], terms: RunTerms) -> tuple[RankId, ...]:
    """`previous[i]`: the slot that was rank i. The answer's item i is rank i; empty: too few."""
    here = _eligible(list(members), terms)
    size = _size(len(here), terms)
    if size == 0:
        return ()
    by_slot = {candidate.rank.slot: candidate.rank for candidate in here}
    veterans = [(place, by_slot.pop(slot)) for place, slot in enumerate(previous) if slot in by_slot]
    places: dict[int, RankId] = {place: rank for place, rank in veterans if place < size}
    moved = [rank for place, rank in veterans if place >= size]
    newcomers = [candidate for candidate in here if candidate.rank.slot in by_slot]
    newcomers.sort(key=lambda c: (c.waiting_since if previous else 0.0, c.rank.slot))
    fill = iter([*moved, *(candidate.rank for candidate in newcomers)])
    return tuple(places[place] if place in places else next(fill) for place in range(size))


def _size(ready: int, terms: RunTerms) -> int:
    size = min(ready, terms.target) // terms.divisible_by * terms.divisible_by
    return size if size >= terms.min_active else 0


def _eligible(members: list[Candidate], terms: RunTerms) -> list[Candidate]:
    ready = [member for member in members if member.is_ready]
    if not terms.hosts_together:
        return ready
    torn = {member.host for member in members if member.host and not member.is_ready}
    return [member for member in ready if member.host not in torn]


# -- counters -----------------------------------------------------------------
#
# Which number the next generation gets, and the restart counters. One allocator, so numbers only rise.
#
# - In-process restart, exclusion of a rank, promotion of a spare, rejoin: current + 1.
# - A process that a supervisor restarted is active for the first time: the next multiple of the stride.
# - `job_restarts` moves when an incident begins, whatever dies after that; `ranks_restarts` when it is recovered.


def next_number(current: int, stride: int, *, is_process_restart: bool) -> int:
    return (current // stride + 1) * stride if is_process_restart else current + 1


def advance(counters: RunCounters, stride: int, *, is_process_restart: bool, after_incident: bool) -> RunCounters:
    """Those of the next generation."""
    number = next_number(counters.number, stride, is_process_restart=is_process_restart)
    begins = is_process_restart or stride == 1 or counters.number < 0
    return replace(
        counters,
        number=number,
        global_iteration=number if begins else counters.global_iteration,
        ranks_restarts=0 if is_process_restart else counters.ranks_restarts + after_incident,
    )


def count_incident(counters: RunCounters) -> RunCounters:
    return replace(counters, job_restarts=counters.job_restarts + 1)


def learn(counters: RunCounters, seen: int, stride: int) -> RunCounters:
    """A rank was told of `seen`, which is not known here any more: the next number is above it."""
    if seen <= counters.number:
        return counters
    return replace(counters, number=seen, global_iteration=max(counters.global_iteration, seen // stride * stride))


# -- restart log --------------------------------------------------------------
#
# What a run has used up: numbers, the restart counters, and why its generations ended (the newest restarts).
#
# A restart begins when a generation is broken, and ends when the next one forms; deaths between belong to it.

KEPT = 16
"""Restarts that a late report may still explain; all are in the archive of incidents."""
LOST_KEPT = 64  # of one restart
EVIDENCE_KEPT = 8  # dead processes of one restart, with their output


class RestartLog:
    """`make_id` makes an unused id of a moment of the wall clock; `emit` gets each incident that changes."""

    def __init__(
        self, record: RunRecord, make_id: Callable[[float], str], emit: Callable[[IncidentChanged], None]
    ) -> None:
        self.counters = record.counters
        self.restarts = record.restarts
        self.formed = record.formed
        self._make_id = make_id
        self._emit = emit
        self._awaits_step = any(r.formed == self.counters.number and r.stepped_at is None for r in record.restarts)

    @property
    def open_one(self) -> RestartRecord | None:
        newest = self._newest
        return newest if newest is not None and newest.formed is None else None

    @property
    def _newest(self) -> RestartRecord | None:
        """That ended a generation."""
        return next((restart for restart in reversed(self.restarts) if not restart.ends_nothing), None)

    @property
    def last_cause(self) -> str:
        """Why the last generation that was broken was."""
        return "" if self._newest is None else self._newest.cause

    def refusal(self, entry: RankHello) -> InvalidRequest | None:
        """It was told of a number that this run cannot have come to: it is not adopted."""
        most = max(self.counters.number, MAX_LEARNED_GENERATION)
        for field, number in (("seen", entry.seen), ("generation", entry.generation)):
            if number is not None and number > most:
                return InvalidRequest(
                    f"is {number}; this run is at generation {self.counters.number}, and none comes to {most}; "
                    "start the process again",
                    field=field,
                )
        return None

    def learn(self, seen: int | None, stride: int) -> None:
        """A rank was told of `seen`: every further number is above it."""
        if seen is not None:
            self.counters = learn(self.counters, seen, stride)

    def begin(self, number: int, cause: str, at: float, lost: tuple[RankId, ...], *, is_fault: bool) -> None:
        """Generation `number` is broken, by a fault or by the return of a rank."""
        self._add(RestartRecord(number, cause, at, self._make_id(at) if is_fault else "", lost))
        if is_fault:
            self.counters = count_incident(self.counters)

    def worsen(self, lost: tuple[RankId, ...], cause: str) -> bool:
        """More is lost before the open one has ended. Whether a mere return has become a fault by it."""
        last = self.open_one
        if last is None:
            return False
        more = tuple(rank for rank in lost if rank not in last.lost)
        worse = replace(last, lost=(last.lost + more)[:LOST_KEPT])
        if last.incident:
            self._replace(last, worse)
            return False
        self._replace(last, replace(worse, cause=cause, incident=self._make_id(last.noticed_at)))
        self.counters = count_incident(self.counters)
        return True

    def explain(self, process: ProcessLost, by: str, number: int, at: float, *, is_rank: bool) -> None:
        """A supervisor says why a process died: of a rank that was lost, or, unless `is_rank`, of one that was none:
        that is an incident of its own, which ends no generation and counts nowhere."""
        rank = process.rank
        found = next((restart for restart in reversed(self.restarts) if rank in restart.lost), None)
        if found is not None:
            if all(known.rank != rank for known in found.evidence):
                cause = f"{rank}: {process.reason}" if found.cause.startswith(f"{rank}: ") else found.cause
                evidence = (*found.evidence, process)[:EVIDENCE_KEPT]
                self._replace(found, replace(found, cause=cause, evidence=evidence))
        elif not is_rank:
            cause = f"{rank}{f' of {by}' if by else ''}: {process.reason}"
            incident = self._make_id(at)
            self._add(RestartRecord(number, cause, at, incident, (rank,), evidence=(process,), ends_nothing=True))

    def form(self, stride: int, at: float, *, is_process_restart: bool) -> RunCounters:
        """Those of the next generation, which ends the open restart."""
        last = self.open_one
        self.counters = advance(
            self.counters,
            stride,
            is_process_restart=is_process_restart,
            after_incident=last is not None and bool(last.incident),
        )
        self.formed += 1
        self._awaits_step = last is not None
        if last is not None:
            self._replace(last, replace(last, formed=self.counters.number, formed_at=at))
        return self.counters

    def step(self, at: float) -> None:
        """A rank of the present generation has done a step. O(1) unless it is the first after a restart."""
        if not self._awaits_step:
            return
        self._awaits_step = False
        for restart in self.restarts:
            if restart.formed == self.counters.number:
                self._replace(restart, replace(restart, stepped_at=at))

    def begin_anew(self) -> None:
        """Another launch: numbers go on upwards, and nothing else does."""
        self.counters = RunCounters(self.counters.number, self.counters.global_iteration)
        self.formed = 0

    def _add(self, restart: RestartRecord) -> None:
        """What is still followed outlives any number of processes that end no generation."""
        followed = self._newest
        self.restarts = (*self.restarts, restart)[-KEPT:]
        if followed is not None and restart.ends_nothing and followed not in self.restarts:
            self.restarts = (followed, *self.restarts[1:])
        self._report(restart)

    def _replace(self, old: RestartRecord, new: RestartRecord) -> None:
        self.restarts = tuple(new if restart is old else restart for restart in self.restarts)
        self._report(new)

    def _report(self, restart: RestartRecord) -> None:
        if restart.incident:
            self._emit(IncidentChanged(restart))


# -- ranks --------------------------------------------------------------------
#
# Which ranks are here. One entry a slot, of its newest process, kept after its end: the records that outlive a crash.
#
# A slot is kept for the rank that has it, and for its supervisor, while its stream is open: another process that asks
# for it must show the same secret. After a restart of the lighthouse it is kept for NAMES_KEPT_S, in which those that
# are there come back. The incarnation of a process is its own for good.
#
# A rank is alive while its stream is open, or for `rank_timeout_s` after its last sign of life. Moments are the
# lighthouse's own monotonic clock, stamped on arrival; no clock of another host is compared.

_TWO_JOBS = (
    "if these are two jobs, name one of them: LIGHTHOUSE_RUN_ID, --run-id or torchrun's --rdzv-id, or LIGHTHOUSE_JOB"
)
NAMES_KEPT_S = 5.0  # after a restart of the lighthouse: ranks and supervisors come back within two seconds


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


# -- formation ----------------------------------------------------------------
#
# When the next generation forms, and of which ranks.
#
# 1. All active ranks of the last generation that are alive are ready: at once. Lost ranks are not waited for, unless
#    ranks are here that are restarted with them: these are about to die. Ranks that are alive and not ready are
#    waited for until `join_timeout_s` after the wait began; then the ready ones go on if they fill at least
#    floor(n/2)+1 of the n places of the last generation.
# 2. None of these ranks is alive, or there was no generation: it is a start. The slots that shall be active are
#    waited for, until the same timeout; then floor(n/2)+1 of these n must be ready.
# 3. Still too few, for `return_timeout_s`: it is hopeless.
# 4. Of an elastic run any `min_active` ranks are enough: the wait begins when so many are ready, and at a start ends
#    as soon as all that may be active are. Fewer are waited for without end.
# 5. After repeated failures it forms no sooner than the budget of restarts allows.


class FormationClock:
    """Reads which ranks are here and the state of the last generation; it keeps only when each wait began, when it
    last looked, and how long the next generation is delayed."""

    def __init__(self) -> None:
        self._waits_since: float | None = None
        self._short_since: float | None = None
        self._looked_at = -math.inf
        self._delayed_until = -math.inf

    def look(self, ranks: Ranks, current: GenerationState, terms: RunTerms, now: float) -> RunVerdict:
        """Call it after each change, and whenever it `is_due`."""
        self._looked_at = now
        is_begun = len(ranks.ready) >= (terms.min_active if terms.is_elastic else 1)
        self._waits_since = _since(self._waits_since, now, is_begun and not current.stands)
        verdict = self.verdict(ranks, current, terms, now)
        self._short_since = _since(self._short_since, now, _is_short(verdict, current))
        return verdict

    def delay(self, until: float) -> None:
        """No generation forms before that."""
        self._delayed_until = until

    def is_hopeless(self, terms: RunTerms, now: float) -> bool:
        return self._short_since is not None and now >= self._short_since + terms.return_timeout_s

    def shift(self, by_s: float) -> None:
        """No rank could be heard for that long."""
        self._waits_since = None if self._waits_since is None else self._waits_since + by_s
        self._short_since = None if self._short_since is None else self._short_since + by_s

    def is_due(self, terms: RunTerms, now: float) -> bool:
        """Time alone may have changed the verdict since the last look."""
        return any(self._looked_at < moment <= now for moment in self.moments(terms))

    def moments(self, terms: RunTerms) -> list[float]:
        """When time alone may change the verdict, or make it hopeless."""
        waits = [] if self._waits_since is None else [self._waits_since + terms.join_timeout_s]
        short = [] if self._short_since is None else [self._short_since + terms.return_timeout_s]
        return [*waits, *short, self._delayed_until]

    def verdict(self, ranks: Ranks, current: GenerationState, terms: RunTerms, now: float) -> RunVerdict:
        if current.stands:
            return RunVerdict.STANDS
        if self._waits_since is None:
            return RunVerdict.WAITING_FOR_RANKS if ranks.ready else RunVerdict.NOBODY_READY
        if _is_incomplete(ranks, current, terms):
            if now < self._waits_since + terms.join_timeout_s:
                return RunVerdict.WAITING_FOR_RANKS
            if not _is_majority(ranks, current, terms):
                return RunVerdict.NO_MAJORITY
        if not choose(ranks, current, terms):
            return RunVerdict.TOO_FEW
        return RunVerdict.READY if now >= self._delayed_until else RunVerdict.BACKING_OFF


def choose(
    ranks: Ranks, current: GenerationState, terms: RunTerms, *, with_running: bool = False
) -> tuple[RankId, ...]:
    """The ranks that would be active now; `with_running`: once all that run are ready. O(n log n)."""
    candidates = (
        Candidate(
            rank.rank,
            rank.host,
            rank.is_ready or (with_running and rank.rank in current.running),
            rank.waits_since or 0.0,
        )
        for rank in ranks
    )
    return assign(candidates, current.slots, terms)


def begins_by_restart(members: Sequence[Rank], current: GenerationState, counters: RunCounters) -> bool:
    """Whether restarted processes begin it; also when numbers go on and all that is here is new: another launch.

    A supervised process is restarted if its supervisor says so, or if another one had its slot: a supervisor that was
    started again counts attempts from 0. A process that somebody started by hand is not.
    """
    new = [rank for rank in members if rank.generation is None]
    is_launch = current.generation is None and counters.number >= 0 and len(new) == len(members)
    return is_launch or any(rank.attempt > 0 or (rank.is_successor and rank.rank.is_supervised) for rank in new)


def _since(before: float | None, now: float, is_so: bool) -> float | None:
    return None if not is_so else now if before is None else before


def _is_short(verdict: RunVerdict, current: GenerationState) -> bool:
    """Too few are left of a generation, and no live rank is waited for."""
    is_lost = verdict is RunVerdict.NO_MAJORITY and not current.survivors
    return current.generation is not None and (verdict is RunVerdict.TOO_FEW or is_lost)


def _is_incomplete(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """A rank is waited for."""
    if current.survivors:
        return bool(current.running) or _is_torn(ranks, current)
    if len(ranks.ready) < terms.target:
        return True
    return not terms.is_elastic and any(slot not in ranks.ready for slot in range(terms.target))


def _is_torn(ranks: Ranks, current: GenerationState) -> bool:
    """Ranks are here that will be restarted with one that is lost. O(n)."""
    return any(rank.is_here and rank.rank.unit in current.lost_units for rank in ranks)


def _is_majority(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """O(n)."""
    if terms.is_elastic:
        return len(ranks.ready) >= terms.min_active
    if not current.survivors:
        return len(ranks.ready) >= terms.target // 2 + 1
    return sum(slot in ranks.ready for slot in current.slots) >= len(current.slots) // 2 + 1


class Generations:
    """A part of the run's machine: what it has to tell goes to `emit`. Nothing is done once the run is over."""

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        now: float,
        emit: Callable[[events.RunEffect], None],
        make_id: Callable[[float], str],
    ) -> None:
        """`record`: what an earlier lighthouse has written down."""
        self.config = config
        self.terms = record.terms
        self.ranks = Ranks(config.rank_timeout_s, record.ranks, now)
        here = [rank.rank for rank in self.ranks.here]
        self.current = GenerationState(record.generation, here, is_broken=record.is_broken, finished=record.finished)
        self.restarts = RestartLog(record, make_id, emit)
        self.budget = RestartBudget(record.failed_at)
        self.progress = GroupProgress(config.run, config.limits)  # of ranks that run the present generation
        self._emit = emit
        self._is_over = False
        self._formation = FormationClock()
        self._held_until = now
        self._began_at = -math.inf  # the present generation
        self._has_stepped = False
        self.steps = 0  # that were told of, in any generation

    def verdict(self, now: float) -> events.RunVerdict:
        return self._formation.verdict(self.ranks, self.current, self.terms, now)

    def deadline(self, now: float) -> float | None:
        """As RunMachine.deadline."""
        moments = [self.ranks.next_at(), *([] if self._is_over else self._formation.moments(self.terms))]
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def is_due(self, now: float) -> bool:
        """Time alone may have changed what `settle` finds."""
        return not self._is_over and self._formation.is_due(self.terms, now)

    def pass_time(self, now: float) -> None:
        for rank in self.ranks.lapsed(now):
            self.lose(rank, f"no heartbeat from it for {self.config.rank_timeout_s:g} s", now)

    def was_late(self, by_s: float, now: float) -> None:
        """The lighthouse itself was paused: ranks and formation get that time back."""
        self.ranks.shift(by_s)
        self._formation.shift(by_s)
        self._held_until = now + by_s + CLOSINGS_HELD_S

    # -- the end of the run

    def end(self) -> None:
        """The run is stopped or completed: no generation breaks or forms."""
        self._is_over = True

    def resume(self) -> None:
        """The stop is lifted: what waits begins to wait now."""
        self._is_over = False
        self._formation = FormationClock()
        self.budget = RestartBudget()

    def begin_anew(self) -> None:
        """Another launch of the run: its numbers go on upwards."""
        self.ranks = Ranks(self.config.rank_timeout_s)
        self.current = GenerationState()
        self.restarts.begin_anew()
        self.resume()

    # -- coming and going

    def enter(self, entry: RankHello, session: int | None, now: float) -> None:
        error = self.restarts.refusal(entry) or self.ranks.refusal(entry, self.terms)
        if error is not None:
            return self._emit(events.RankRefused(entry.rank, error))
        if entry.terms != self.terms:  # it was not refused: no rank is here
            self.terms, self.ranks = entry.terms, Ranks(self.config.rank_timeout_s)
        old = self.ranks.of_slot(entry.rank.slot)
        if old is not None and old.is_here and old.rank != entry.rank:
            self.lose(old, "its process has restarted", now)
        self.restarts.learn(entry.seen, self.terms.stride)
        self.restarts.learn(entry.generation, self.terms.stride)
        rank = self.ranks.enter(entry, session, now)
        self.ranks.run(rank)
        self.current.come_back(rank.rank)
        if entry.is_ready:
            return self._ready(rank, entry.generation, now)
        return self._holds(rank, entry.generation)

    def end_session(self, session: int, now: float) -> None:
        rank = self.ranks.of_session(session)
        if rank is None:
            return
        if now < self._held_until:
            self.ranks.close(rank, self._held_until)
        else:
            self.lose(rank, "its connection was lost", now)

    def lose(self, rank: Rank, reason: str, now: float) -> None:
        self.ranks.lose(rank)
        self.progress.remove_rank(rank.rank.slot)
        if self.current.lose(rank.rank):
            self._break(f"{rank.rank}: {reason}", now, lost=(rank.rank,))

    # -- what ranks say

    def hear(self, rank_id: RankId, message: events.RankMessage, now: float) -> None:
        rank = self.ranks.get(rank_id)
        if rank is None:
            self._emit(events.RankRefused(rank_id, self.ranks.why_not(rank_id)))
            return
        self.ranks.see(rank, now)
        match message:
            case RankHeartbeat(step, phase, progress):
                runs = self.current.runs(rank.rank, self.current.number)
                is_step = step > rank.step and runs
                rank.step, rank.phase = step or rank.step, phase or rank.phase
                if progress is not None and runs:
                    process = Process(rank.rank.incarnation, rank.host, rank.pid)
                    self.progress.add_sample(rank.rank.slot, process, progress, now)
                if is_step:
                    self._has_stepped = True
                    self.steps += 1
                    self.restarts.step(self.wall(now))
            case ReadyReport(generation):
                self._ready(rank, generation, now)
            case FailureReport(generation, reason):
                self._fail(rank, generation, reason, now)
            case FinishReport(generation):
                self._finish(rank, generation)
            case CloseReport():
                if self.terms.is_elastic:
                    self._complete(max(0, self.current.number))

    def _holds(self, rank: Rank, generation: int | None) -> None:
        """It runs that generation; None: it starts, and will be ready."""
        if generation is None:
            return
        rank.generation = generation
        if not self.current.runs(rank.rank, generation):
            self._emit(events.Interrupted(generation, "this generation has ended", (rank.rank,)))

    def _ready(self, rank: Rank, generation: int | None, now: float) -> None:
        if not self.current.has_heard(rank.rank, generation):
            self._hand(rank)
            return
        rank.generation = rank.generation if generation is None else generation
        self.ranks.wait(rank, now)
        self.current.ready(rank.rank)
        self._admit(rank, now)

    def _admit(self, rank: Rank, now: float) -> None:
        """Rule 4."""
        if not self.current.stands:
            return
        size = len(self.current.active)
        may_grow = size < self.terms.target and not self.current.finished
        if may_grow and len(choose(self.ranks, self.current, self.terms, with_running=True)) > size:
            self._break(f"{rank.rank} comes in", now, is_fault=False)
        else:
            self._hand(rank)

    def _hand(self, rank: Rank) -> None:
        """Ranks are told by slot, so the successor of a rank that has finished is told nothing: it waits."""
        assert self.current.generation is not None
        if not self.current.is_place_of_another(rank.rank):
            self._emit(events.GenerationTold(rank.rank, self.current.generation))

    def _fail(self, rank: Rank, generation: int, reason: str, now: float) -> None:
        """A failure in a broken generation is a consequence of the break."""
        if not self.current.can_fail(rank.rank, generation):
            return
        lasted_s = now - self._began_at
        delay_s = self.budget.add_failure(self.terms, self.wall(now), lasted_s=lasted_s, has_stepped=self._has_stepped)
        self._formation.delay(now + delay_s)
        self._break(f"{rank.rank} has failed: {reason}", now, is_failure=True)

    def fail_behind(self, slots: Iterable[int], reason: str, now: float) -> None:
        """The function of ranks that the others wait for in vain has failed."""
        for rank in map(self.ranks.of_slot, slots):
            if rank is not None:
                self._fail(rank, self.current.number, reason, now)

    def _finish(self, rank: Rank, generation: int) -> None:
        if not self.current.runs(rank.rank, generation):
            self._holds(rank, generation)
        elif not self.current.finish(rank.rank):
            self._emit(events.RecordChanged())
        else:
            self._complete(generation)

    def _complete(self, number: int) -> None:
        self.end()
        self._emit(events.Completed(number, self.everyone, is_new=True))

    # -- breaking and forming

    @property
    def everyone(self) -> tuple[RankId, ...]:
        """All ranks that are here, in order."""
        return tuple(sorted(rank.rank for rank in self.ranks.here))

    def _break(
        self,
        cause: str,
        now: float,
        *,
        lost: tuple[RankId, ...] = (),
        is_fault: bool = True,
        is_failure: bool = False,
    ) -> None:
        if self._is_over or self.current.generation is None:
            return
        number = self.current.number
        if self.current.is_broken:
            if self.restarts.worsen(lost, cause):
                self._emit(events.Interrupted(number, cause, (), is_new=True))
            return
        self.current.is_broken = True
        self.restarts.begin(number, cause, self.wall(now), lost, is_fault=is_fault)
        running = tuple(sorted(self.current.running))
        self._emit(events.Interrupted(number, cause, running, is_new=True, is_failure=is_failure))

    def settle(self, now: float) -> str:
        """Form the next generation if it is time. Returns why the run is to be stopped, or nothing."""
        if self._is_over:
            return ""
        if self.current.is_broken and (why := self.budget.why_exhausted(self.terms)):
            return f"{why}; the last: {self.restarts.last_cause}"
        verdict = self._formation.look(self.ranks, self.current, self.terms, now)
        if verdict is events.RunVerdict.READY:
            return self._form(now)
        if self._formation.is_hopeless(self.terms, now):
            needed = max(self.terms.min_active, self.terms.divisible_by)
            return f"min_active: {len(self.ranks.ready)} ranks are left, {needed} are needed"
        return ""

    def _form(self, now: float) -> str:
        limit = self.terms.max_iterations
        if limit is not None and self.restarts.formed >= limit:
            return f"max_iterations: {limit} generations were run"
        left_out, before = tuple(sorted(self.current.running)), self.current.number
        generation = self._begin(choose(self.ranks, self.current, self.terms), now)
        spares = tuple(sorted(rank.rank for rank in self.ranks.ready.values()))
        self._emit(events.GenerationFormed(generation, spares))
        if left_out:
            reason = f"generation {generation.number} has formed without it"
            self._emit(events.Interrupted(before, reason, left_out))
        return ""

    def _begin(self, chosen: tuple[RankId, ...], now: float) -> Generation:
        members = [rank for rank in map(self.ranks.get, chosen) if rank is not None]
        counters = self.restarts.form(
            self.terms.stride,
            self.wall(now),
            is_process_restart=begins_by_restart(members, self.current, self.restarts.counters),
        )
        generation = self.current.begin(chosen, counters)
        for rank in self.ranks:
            self.progress.remove_rank(rank.rank.slot)
        for rank in members:
            self.ranks.run(rank)
            rank.generation = generation.number
        self._formation = FormationClock()
        self._began_at, self._has_stepped = now, False
        return generation

    def wall(self, now: float) -> float:
        return now + self.config.wall_offset_s
