"""Generations of one run. A generation is one attempt to run the user's function on a set of ranks.

The *active* ranks run the function, and the *spares* wait. When a generation breaks, a new one forms.

1. Only the lighthouse assigns generation numbers. A number is stored before any rank receives it, and is never reused.
2. A generation stands until one of its active ranks is lost or fails. It is then broken, and the other active ranks are
   interrupted and report ready. A rank may also report ready on its own. The loss of a spare breaks nothing.
3. `decide_generation` decides when the next generation forms, and `assign` chooses its ranks. All of them receive the
   generation at once.
4. A rank that reports ready while a generation stands becomes a spare and receives the generation at once. If the next
   generation would be larger with that rank, the generation is broken instead, which is not an incident.
5. The lighthouse sends the current generation again to a rank that has not received it. A rank that reports a different
   number is notified that its generation has ended, so no rank waits for an outdated generation.
6. `form_if_ready` stops the run after `max_iterations` generations, if too few ranks remain for too long, or if the
   function fails more often than the restart budget allows.
7. Once a rank has finished a generation, new ranks no longer break it. When all its ranks have finished, the run is
   completed. A rank of an elastic run may close the run, which completes it for all ranks, finished or not.

Ranks repeat their state in their reports, so a lost message does no harm. With n ranks, an event that changes nothing
takes O(1) time, and forming a generation takes O(n log n).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from lighthouse.job import events
from lighthouse.job.presence import CLOSINGS_HELD_S
from lighthouse.job.records import GenerationState, Rank, RestartRecord, RunConfig, RunRecord
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


def assign(
    members: Iterable[Rank], previous: Sequence[int], terms: RunTerms, running: Set[RankId] = frozenset()
) -> tuple[RankId, ...]:
    """Choose the active ranks of the next generation and their places. All other ready ranks become spares.

    A slot is the fixed number of a process in the run. A place is the number of an active rank in the generation.

    - The number of active ranks is a multiple of `divisible_by`, at least `min_active` and at most `target`, or 0.
    - A slot keeps its place, so a restarted process gets the place of its predecessor. Spares fill the gaps, the
      longest waiting first. If the generation shrinks, the ranks with the highest places move into the gaps.
    - In the first generation, ranks are placed in the order of their slots.
    - With `hosts_together`, ranks on a host are active only if all known slots of that host are ready.

    Args:
        members: All known ranks.
        previous: Slots of the last generation's active ranks, by place.
        terms: Settings of the run.
        running: Ranks that count as ready although they are running the current generation.

    Returns:
        The active ranks, by place. Empty if too few ranks are ready.
    """
    eligible = _eligible(list(members), terms, running)
    size = min(len(eligible), terms.target) // terms.divisible_by * terms.divisible_by
    if size == 0 or size < terms.min_active:
        return ()
    by_slot = {member.rank.slot: member.rank for member in eligible}
    veterans = [(place, by_slot.pop(slot)) for place, slot in enumerate(previous) if slot in by_slot]
    places: dict[int, RankId] = {place: rank for place, rank in veterans if place < size}
    moved = [rank for place, rank in veterans if place >= size]
    newcomers = [member for member in eligible if member.rank.slot in by_slot]
    newcomers.sort(key=lambda member: (member.waits_since or 0.0 if previous else 0.0, member.rank.slot))
    fill = iter([*moved, *(member.rank for member in newcomers)])
    return tuple(places[place] if place in places else next(fill) for place in range(size))


def _eligible(members: list[Rank], terms: RunTerms, running: Set[RankId]) -> list[Rank]:
    ready = [member for member in members if member.is_ready or member.rank in running]
    if not terms.hosts_together:
        return ready
    slots = {member.rank.slot for member in ready}
    torn = {member.host for member in members if member.host and member.rank.slot not in slots}
    return [member for member in ready if member.host not in torn]


def advance(counters: RunCounters, stride: int, *, is_process_restart: bool, after_incident: bool) -> RunCounters:
    """Return the counters for the next generation.

    Its number is the next one, or after a process restart the next multiple of `stride` (see `RunTerms`).
    `ranks_restarts` counts the incidents from which the run has recovered since the last process restart.
    `after_incident` is True if this generation forms after such an incident.
    `job_restarts` stays the same: `RestartLog` increments it when an incident begins.
    """
    number = (counters.number // stride + 1) * stride if is_process_restart else counters.number + 1
    begins = is_process_restart or stride == 1 or counters.number < 0
    return replace(
        counters,
        number=number,
        global_iteration=number if begins else counters.global_iteration,
        ranks_restarts=0 if is_process_restart else counters.ranks_restarts + after_incident,
    )


RESTARTS_KEPT = 16  # late reports may still explain these; the incident archive keeps all restarts
LOST_KEPT = 64  # lost ranks of one restart
EVIDENCE_KEPT = 8  # dead processes of one restart, with their output


class RestartLog:
    """Generation numbers and restart counters of a run, with the causes of its most recent restarts.

    A restart begins when a generation breaks and ends when the next one forms. It includes all losses in between.
    """

    def __init__(self, record: RunRecord, make_id: Callable[[float], str], effects: list[events.RunEffect]) -> None:
        """Restore the log from a run's stored record. The log appends its effects to `effects`.

        `make_id` returns an id for the incident that was noticed at a given Unix time.
        """
        self.counters = record.counters
        self.restarts = record.restarts
        self.formed = record.formed
        self._make_id = make_id
        self._effects = effects
        self._awaits_step = any(r.formed == self.counters.number and r.stepped_at is None for r in record.restarts)

    @property
    def open_restart(self) -> RestartRecord | None:
        newest = self._newest
        return newest if newest is not None and newest.formed is None else None

    @property
    def _newest(self) -> RestartRecord | None:
        """Most recent restart that ended a generation, or None."""
        return next((restart for restart in reversed(self.restarts) if not restart.ends_nothing), None)

    @property
    def last_cause(self) -> str:
        """Cause of the most recent break of a generation, or "" if no generation has broken."""
        return "" if self._newest is None else self._newest.cause

    @property
    def lost_ranks(self) -> set[RankId]:
        """Active ranks that this log records as lost. The log is bounded, so this takes constant time."""
        return {rank for restart in self.restarts if not restart.ends_nothing for rank in restart.lost}

    def check_numbers(self, entry: RankHello) -> InvalidRequest | None:
        """Return an error if a rank's hello contains a generation number that is too high for this run, else None."""
        most = max(self.counters.number, MAX_LEARNED_GENERATION)
        for field, number in (("seen", entry.seen), ("generation", entry.generation)):
            if number is not None and number > most:
                return InvalidRequest(
                    f"is {number}; this run is at generation {self.counters.number}, and numbers above {most} are "
                    "invalid; start the process again",
                    field=field,
                )
        return None

    def skip_seen_numbers(self, seen: int | None, stride: int) -> None:
        """Make all later generation numbers exceed `seen`, the highest number that a rank has received, if any.

        This also raises `global_iteration` to the last multiple of `stride` up to `seen`, unless it is higher already.
        """
        if seen is not None and seen > self.counters.number:
            iteration = max(self.counters.global_iteration, seen // stride * stride)
            self.counters = replace(self.counters, number=seen, global_iteration=iteration)

    def begin_restart(self, number: int, cause: str, at: float, lost: tuple[RankId, ...], *, is_fault: bool) -> None:
        """Begin a restart because generation `number` broke. `is_fault` is False if it broke only to admit a rank."""
        incident = self._make_id(at) if is_fault else ""
        self._append_restart(RestartRecord(number, cause, at, incident, lost, caused_by=next(iter(lost), None)))
        if is_fault:
            self._count_incident()

    def add_losses(self, lost: tuple[RankId, ...], cause: str) -> bool:
        """Add lost ranks to the open restart. Return whether they turned a restart without a fault into an incident."""
        last = self.open_restart
        if last is None:
            return False
        more = tuple(rank for rank in lost if rank not in last.lost)
        worse = replace(last, lost=(last.lost + more)[:LOST_KEPT])
        if last.incident:
            self._replace_restart(last, worse)
            return False
        incident = self._make_id(last.noticed_at)
        self._replace_restart(last, replace(worse, cause=cause, incident=incident, caused_by=next(iter(lost), None)))
        self._count_incident()
        return True

    def add_exit(self, process: ProcessLost, by: str, number: int, at: float, *, is_rank: bool) -> None:
        """Add the report of supervisor `by` on a dead process, received in generation `number`.

        The report becomes evidence of the restart in which the process was lost. If there is none and the process was
        not a rank, the report is a separate incident, which ends no generation and changes no counter.
        """
        rank = process.rank
        found = next((restart for restart in reversed(self.restarts) if rank in restart.lost), None)
        if found is not None:
            if all(known.rank != rank for known in found.evidence):
                cause = f"{rank}: {process.reason}" if found.caused_by == rank else found.cause
                evidence = (*found.evidence, process)[:EVIDENCE_KEPT]
                self._replace_restart(found, replace(found, cause=cause, evidence=evidence))
        elif not is_rank:
            cause = f"{rank}{f' of {by}' if by else ''}: {process.reason}"
            incident = self._make_id(at)
            self._append_restart(
                RestartRecord(number, cause, at, incident, (rank,), evidence=(process,), ends_nothing=True)
            )

    def end_restart(self, stride: int, at: float, *, is_process_restart: bool) -> RunCounters:
        """End the open restart, if any, because the next generation forms. Return that generation's counters.

        `stride` and `is_process_restart` have the same meaning as in `advance`.
        """
        last = self.open_restart
        self.counters = advance(
            self.counters,
            stride,
            is_process_restart=is_process_restart,
            after_incident=last is not None and bool(last.incident),
        )
        self.formed += 1
        self._awaits_step = last is not None
        if last is not None:
            self._replace_restart(last, replace(last, formed=self.counters.number, formed_at=at))
        return self.counters

    def record_step(self, at: float) -> None:
        """Record that the current generation has completed a step. Only the first step after a restart matters."""
        if not self._awaits_step:
            return
        self._awaits_step = False
        for restart in self.restarts:
            if restart.formed == self.counters.number:
                self._replace_restart(restart, replace(restart, stepped_at=at))

    def reset_for_launch(self) -> None:
        """Reset all counters for another launch of the run, except the generation number."""
        self.counters = RunCounters(self.counters.number, self.counters.global_iteration)
        self.formed = 0

    def _count_incident(self) -> None:
        self.counters = replace(self.counters, job_restarts=self.counters.job_restarts + 1)

    def _append_restart(self, restart: RestartRecord) -> None:
        """Append a restart. Drop the oldest restarts, but keep the most recent one that ended a generation."""
        followed = self._newest
        self.restarts = (*self.restarts, restart)[-RESTARTS_KEPT:]
        if followed is not None and restart.ends_nothing and followed not in self.restarts:
            self.restarts = (followed, *self.restarts[1:])
        self._emit_incident(restart)

    def _replace_restart(self, old: RestartRecord, new: RestartRecord) -> None:
        self.restarts = tuple(new if restart is old else restart for restart in self.restarts)
        self._emit_incident(new)

    def _emit_incident(self, restart: RestartRecord) -> None:
        if restart.incident:
            self._effects.append(events.IncidentChanged(restart))


_TWO_JOBS = (
    "if these are two jobs, name one of them: LIGHTHOUSE_RUN_ID, --run-id or torchrun's --rdzv-id, or LIGHTHOUSE_JOB"
)
NAMES_KEPT_S = 5.0  # after a restart of the lighthouse; ranks and supervisors normally reconnect within two seconds


class Ranks:
    """Ranks of a run: the newest process in each slot, even if it has exited or the lighthouse has restarted since.

    While a process's stream is open, only a process with the same secret can take over its slot. A supervisor and its
    processes share one secret. After a restart of the lighthouse, slots stay reserved for NAMES_KEPT_S seconds. An
    incarnation always belongs to the process that used it first.

    A rank is alive while its stream is open, or for `rank_timeout_s` after its last message. Messages are stamped on
    arrival with the lighthouse's monotonic clock, so the clocks of other hosts do not matter.
    """

    def __init__(self, rank_timeout_s: float, records: Iterable[Rank] = (), now: float = 0.0) -> None:
        """Restore the ranks from stored records. Ranks that were alive have `rank_timeout_s` seconds to reconnect."""
        self._timeout_s = rank_timeout_s
        self._slots = {r.rank.slot: replace(r, seen_at=now, lapses_at=now + rank_timeout_s) for r in records}
        self._without_stream = {slot for slot, rank in self._slots.items() if rank.is_here}
        self._lapses_from = now + rank_timeout_s  # no rank lapses before this moment
        self._kept_until = now + NAMES_KEPT_S if self._slots else -math.inf
        self._sessions: dict[int, Rank] = {}
        self.ready: dict[int, Rank] = {}

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._slots.values())

    def rank_records(self, wall_offset_s: float) -> tuple[Rank, ...]:
        return tuple(replace(r, seen_at=r.seen_at + wall_offset_s, session=None, waits_since=None) for r in self)

    @property
    def has_no_live_rank(self) -> bool:
        return not any(rank.is_here for rank in self)

    @property
    def live_ranks(self) -> list[Rank]:
        return [rank for rank in self if rank.is_here]

    def rank_of_slot(self, slot: int) -> Rank | None:
        return self._slots.get(slot)

    def find_live(self, rank: RankId) -> Rank | None:
        """Return the record of this process if it is alive and still has its slot, or None."""
        found = self._slots.get(rank.slot)
        return found if found is not None and found.is_here and found.rank == rank else None

    def is_newest(self, rank: RankId) -> bool:
        """Return whether this process, alive or not, is the newest of its slot."""
        found = self._slots.get(rank.slot)
        return found is not None and found.rank == rank

    @property
    def are_connected(self) -> bool:
        """True if at least one rank has an open stream."""
        return bool(self._sessions)

    def why_not_live(self, rank: RankId) -> LighthouseError:
        """Return the error for a message from a process that is not, or no longer, a live rank."""
        found = self._slots.get(rank.slot)
        if found is not None and found.rank != rank:
            return Superseded(f"{rank} has a successor, {found.rank}; end this process")
        return UnknownName(f"{rank} is not connected; enter again")

    def check_hello(self, entry: RankHello, terms: RunTerms) -> LighthouseError | None:
        """Return the error for a process that may not enter the run, or None. `terms` are the run's settings."""
        size = entry.terms.world_size
        if not 0 <= entry.rank.slot < size:
            return InvalidRequest(f"is {entry.rank.slot}; a world of {size} has slots 0 to {size - 1}", field="slot")
        if entry.terms != terms and not self.has_no_live_rank:
            return WrongState(
                f"terms: {entry.rank} has {entry.terms}, but the connected ranks have {terms}; {_TWO_JOBS}"
            )
        return self._check_duplicate(entry)

    def check_owner(self, entry: RankHello, now: float) -> DuplicateReplica | None:
        """Return an error if the slot or incarnation belongs to a process with a different secret, otherwise None."""
        old = self._slots.get(entry.rank.slot)
        if old is None or not old.secret or is_shown(entry.secret, old.secret):
            return None
        is_kept = old.is_here and (old.session is not None or now < self._kept_until)
        return _taken(old, entry) if is_kept or old.rank == entry.rank else None

    def _check_duplicate(self, entry: RankHello) -> DuplicateReplica | None:
        """Return an error if the slot's current process keeps the slot, or None if the new process takes it over.

        A process with a higher attempt number takes over the slot. If the old process has no open stream, a process
        with the same attempt number also takes over the slot, and so does one with attempt number 0 that has seen no
        generation, such as the first process of a restarted supervisor.
        """
        old = self._slots.get(entry.rank.slot)
        if old is None or not old.is_here or old.rank == entry.rank or entry.attempt > old.attempt:
            return None
        if old.session is None and (entry.attempt == old.attempt or entry.is_first):
            return None
        return _taken(old, entry)

    def rank_of_session(self, session: int) -> Rank | None:
        return self._sessions.get(session)

    def is_of_slot(self, slot: int, secret: str) -> bool:
        """Return whether the slot's rank is alive and has this secret."""
        rank = self._slots.get(slot)
        return rank is not None and rank.is_here and is_shown(secret, rank.secret)

    def place_hello(self, entry: RankHello) -> RankHello:
        """Assign a slot to a rank of an elastic run, and return the rank's hello with that slot.

        The rank keeps its slot if it has one. Otherwise it gets the requested slot if free, or the first free slot. If
        no slot is free, or if the run is not elastic, the hello stays unchanged.
        """
        if not entry.terms.is_elastic:
            return entry
        own = next((slot for slot, rank in self._slots.items() if rank.rank.incarnation == entry.rank.incarnation), -1)
        taken = {slot for slot, rank in self._slots.items() if rank.is_here and slot != own}
        wishes = (own, entry.rank.slot, *range(entry.terms.world_size))
        slot = next((slot for slot in wishes if slot >= 0 and slot not in taken), entry.rank.slot)
        return replace(entry, rank=replace(entry.rank, slot=slot))

    # -- events

    def enter_rank(self, entry: RankHello, session: int | None, now: float) -> Rank:
        """Add or update a process's record and return it. `session` is its stream, or None if it has no stream."""
        rank = self._slots.get(entry.rank.slot)
        if rank is None or rank.rank != entry.rank:
            self._release_slot(rank)
            is_successor = rank is not None
            rank = self._slots[entry.rank.slot] = Rank(entry.rank, now, now, is_successor=is_successor, entered_at=now)
        elif rank.session is not None:
            self._sessions.pop(rank.session, None)
        rank.attempt, rank.host, rank.pid, rank.is_here = entry.attempt, entry.host, entry.pid, True
        rank.secret = digest_of(entry.secret)
        rank.step = max(rank.step, entry.step)
        rank.session = session
        self.record_rank_message(rank, now)
        self._without_stream.discard(entry.rank.slot)
        if session is not None:
            self._sessions[session] = rank
        else:
            self._watch_lapse(rank)
        return rank

    def record_rank_message(self, rank: Rank, now: float) -> None:
        rank.seen_at, rank.lapses_at = now, now + self._timeout_s

    def close_stream(self, rank: Rank, lapses_at: float) -> None:
        """Record that a rank's stream has closed. The rank is lost at `lapses_at` unless it reconnects before then."""
        if rank.session is not None:
            self._sessions.pop(rank.session, None)
        rank.session, rank.lapses_at = None, lapses_at
        self._watch_lapse(rank)

    def add_ready(self, rank: Rank, now: float) -> None:
        if rank.waits_since is None:
            rank.waits_since = now
        self.ready[rank.rank.slot] = rank

    def remove_ready(self, rank: Rank) -> None:
        rank.waits_since = None
        self.ready.pop(rank.rank.slot, None)

    def mark_rank_lost(self, rank: Rank) -> None:
        self._release_slot(rank)
        rank.is_here, rank.session = False, None

    def adopt_world_size(self, world_size: int) -> None:
        """Drop slots `world_size` and above, because the run has started again with new terms. No rank may be alive.

        The other slots keep the records of their lost processes, so that the next process in each slot counts as a
        successor. These records name no host, because the new terms may assign the slots to other hosts.
        """
        self._slots = {slot: replace(rank, host="") for slot, rank in self._slots.items() if slot < world_size}

    def lapsed_ranks(self, now: float) -> list[Rank]:
        """Return the ranks without a stream whose timeout has expired. The caller must mark each of them as lost."""
        if not self._without_stream or now < self._lapses_from:
            return []
        ranks = [self._slots[slot] for slot in sorted(self._without_stream)]
        self._lapses_from = min((rank.lapses_at for rank in ranks if rank.lapses_at > now), default=math.inf)
        return [rank for rank in ranks if rank.lapses_at <= now]

    def next_lapse_at(self) -> float | None:
        """Return the earliest time at which a rank without a stream may time out, or None if no rank can."""
        return self._lapses_from if self._without_stream and self._lapses_from < math.inf else None

    def postpone_lapses(self, by_s: float) -> None:
        """Postpone all timeouts by the `by_s` seconds for which the lighthouse was paused and read no messages."""
        for rank in self:
            rank.lapses_at += by_s
            rank.seen_at += by_s
        self._lapses_from += by_s
        self._kept_until += by_s

    def _watch_lapse(self, rank: Rank) -> None:
        self._without_stream.add(rank.rank.slot)
        self._lapses_from = min(self._lapses_from, rank.lapses_at)

    def _release_slot(self, rank: Rank | None) -> None:
        if rank is None:
            return
        self.remove_ready(rank)
        self._without_stream.discard(rank.rank.slot)
        if rank.session is not None:
            self._sessions.pop(rank.session, None)


def _taken(old: Rank, entry: RankHello) -> DuplicateReplica:
    return DuplicateReplica(
        f"slot: {entry.rank.slot} is that of pid {old.pid} on {old.host or 'an unnamed host'} "
        f"(attempt {old.attempt}); pid {entry.pid} on {entry.host or 'an unnamed host'} "
        f"(attempt {entry.attempt}) asks for it; give each process of this run its own slot (RANK); {_TWO_JOBS}"
    )


@dataclass(frozen=True, slots=True)
class GenerationDecision:
    """Result of `decide_generation`: whether the next generation forms now and, if not, since when it has waited."""

    verdict: events.RunVerdict = events.RunVerdict.NOBODY_READY
    chosen: tuple[RankId, ...] = ()
    """Active ranks of the next generation. Empty if too few ranks can be active."""
    waits_since: float | None = None
    """When the wait for the other ranks began, because enough ranks were ready. None if it has not begun."""
    short_since: float | None = None
    """When the number of remaining ranks became too low to continue. None while enough remain."""
    is_hopeless: bool = False
    """True if the run must stop, because too few ranks have remained for too long."""
    next_at: float | None = None
    """Next time at which the decision may change without an event."""

    def postponed_by(self, by_s: float) -> "GenerationDecision":
        """Return a copy whose waits began `by_s` seconds later, so that a pause of that length does not count."""
        return replace(
            self,
            waits_since=None if self.waits_since is None else self.waits_since + by_s,
            short_since=None if self.short_since is None else self.short_since + by_s,
        )


def decide_generation(
    ranks: Ranks, current: GenerationState, terms: RunTerms, before: GenerationDecision, now: float
) -> GenerationDecision:
    """Decide whether the next generation forms now, and with which ranks.

    1. The next generation forms, without the lost ranks, as soon as all live active ranks of the last generation are
       ready and no process is about to be restarted together with a lost one. If this takes longer than
       `join_timeout_s`, the ready ranks continue without the others, provided that they hold more than half of the last
       generation's places.
    2. If no active rank of the last generation is alive, or no generation has formed yet, the run is starting. It waits
       up to `join_timeout_s` for all slots below `target`. After that, floor(target/2)+1 ready ranks suffice.
    3. If too few ranks remain to continue, and this lasts for `return_timeout_s`, the run stops (`is_hopeless`).
    4. An elastic run needs any `min_active` ranks, for which it waits without a timeout. When that many are ready, the
       wait for more begins. If the run is starting, this wait ends early when the maximum number is ready.
    5. After repeated failures, the restart budget delays the next generation.

    Args:
        ranks: Ranks of the run.
        current: The last generation.
        terms: Settings of the run.
        before: Previous decision, with the start times of the current waits.
        now: Current time.
    """
    if current.is_standing:
        return GenerationDecision(events.RunVerdict.STANDS)
    is_begun = len(ranks.ready) >= (terms.min_active if terms.is_elastic else 1)
    waits_since = _since(before.waits_since, now, is_begun)
    join_by = math.inf if waits_since is None else waits_since + terms.join_timeout_s
    is_incomplete = is_begun and _is_incomplete(ranks, current, terms)
    chosen: tuple[RankId, ...] = ()
    if not is_begun:
        verdict = events.RunVerdict.WAITING_FOR_RANKS if ranks.ready else events.RunVerdict.NOBODY_READY
    elif is_incomplete and now < join_by:
        verdict = events.RunVerdict.WAITING_FOR_RANKS
    elif is_incomplete and not _is_majority(ranks, current, terms):
        verdict = events.RunVerdict.NO_MAJORITY
    elif not (chosen := assign(ranks, current.slots, terms)):
        verdict = events.RunVerdict.TOO_FEW
    else:
        verdict = events.RunVerdict.READY if now >= current.delayed_until else events.RunVerdict.BACKING_OFF
    short_since = _since(before.short_since, now, _is_short(verdict, current))
    stops_at = math.inf if short_since is None else short_since + terms.return_timeout_s
    later = [moment for moment in (join_by, stops_at, current.delayed_until) if now < moment < math.inf]
    return GenerationDecision(verdict, chosen, waits_since, short_since, now >= stops_at, min(later, default=None))


def is_process_restart(members: Sequence[Rank], current: GenerationState, restarts: RestartLog) -> bool:
    """Return whether a generation of `members` contains restarted processes or begins another launch of the run.

    A process counts as restarted if its supervisor reports an attempt above 0, or if another process had its slot
    before, because a restarted supervisor counts attempts from 0 again. A process that was started by hand does not
    count, nor does one that was active before, even if it was lost before it received its generation's number. The
    generation begins another launch if there is no current generation, an earlier launch has used generation numbers,
    and all processes are new.
    """
    lost = restarts.lost_ranks
    new = [rank for rank in members if rank.generation is None and rank.rank not in lost]
    is_launch = current.generation is None and restarts.counters.number >= 0 and len(new) == len(members)
    return is_launch or any(rank.attempt > 0 or (rank.is_successor and rank.rank.is_supervised) for rank in new)


def _since(before: float | None, now: float, is_so: bool) -> float | None:
    return None if not is_so else now if before is None else before


def _is_short(verdict: events.RunVerdict, current: GenerationState) -> bool:
    """Return whether a run that has had a generation now has too few ranks to form the next one."""
    is_lost = verdict is events.RunVerdict.NO_MAJORITY and not current.survivors
    return current.generation is not None and (verdict is events.RunVerdict.TOO_FEW or is_lost)


def _is_incomplete(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """Return whether the next generation should wait for more ranks."""
    if any(r.is_here and current.is_to_restart(r) for r in ranks):
        return True
    if current.survivors:
        return bool(current.running)
    if len(ranks.ready) < terms.target:
        return True
    return not terms.is_elastic and any(slot not in ranks.ready for slot in range(terms.target))


def _is_majority(ranks: Ranks, current: GenerationState, terms: RunTerms) -> bool:
    """Return whether enough ranks are ready to continue once `join_timeout_s` has passed."""
    if terms.is_elastic:
        return len(ranks.ready) >= terms.min_active
    if not current.survivors:
        return len(ranks.ready) >= terms.target // 2 + 1
    return sum(slot in ranks.ready for slot in current.slots) >= len(current.slots) // 2 + 1


class Generations:
    """Part of `RunMachine` that tracks the ranks of a run and forms its generations."""

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        now: float,
        effects: list[events.RunEffect],
        make_id: Callable[[float], str],
    ) -> None:
        """Restore the state from a run's stored record. All methods append their effects to `effects`.

        `make_id` returns an id for the incident that was noticed at a given Unix time.
        """
        self.config = config
        self.terms = record.terms
        self.ranks = Ranks(config.rank_timeout_s, record.ranks, now)
        here = [rank.rank for rank in self.ranks.live_ranks]
        self.current = GenerationState(record.generation, here, is_broken=record.is_broken, finished=record.finished)
        self.restarts = RestartLog(record, make_id, effects)
        self.budget = RestartBudget(record.failed_at)
        self.progress = GroupProgress(config.run, config.limits)  # ranks that run the current generation
        self._effects = effects
        self._is_over = False
        self._decision = GenerationDecision()
        self._held_until = now
        self.steps = 0  # reported steps of all generations

    def verdict(self, now: float) -> events.RunVerdict:
        return self._decide_next(now).verdict

    def deadline(self, now: float) -> float | None:
        """Return the next time after `now` at which the state may change without an event, or None."""
        moments = (self.ranks.next_lapse_at(), None if self._is_over else self._decision.next_at)
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def is_decision_due(self, now: float) -> bool:
        """Return whether a timeout has expired, so that `form_if_ready` must be called even without an event."""
        next_at = self._decision.next_at
        return not self._is_over and next_at is not None and next_at <= now

    def lose_lapsed_ranks(self, now: float) -> None:
        for rank in self.ranks.lapsed_ranks(now):
            self.lose_rank(rank, f"no heartbeat from it for {self.config.rank_timeout_s:g} s", now)

    def postpone_timers(self, by_s: float, now: float) -> None:
        """Postpone all timeouts by the `by_s` seconds for which the lighthouse was paused and read no messages."""
        self.ranks.postpone_lapses(by_s)
        self._decision = self._decision.postponed_by(by_s)
        self._held_until = max(self._held_until, now + CLOSINGS_HELD_S) + by_s

    # -- end of the run

    def end_run(self) -> None:
        """Record that the run has been stopped or completed. From then on, no generation breaks or forms."""
        self._is_over = True

    def resume_forming(self) -> None:
        """Allow generations to form again after a stop. Reset all waits and the restart budget."""
        self._is_over = False
        self._decision, self.current.delayed_until = GenerationDecision(), -math.inf
        self.budget = RestartBudget()

    def begin_launch(self) -> None:
        """Reset the state for another launch of the run. Only the generation numbers continue."""
        self.ranks = Ranks(self.config.rank_timeout_s)
        self.current = GenerationState()
        self.restarts.reset_for_launch()
        self.resume_forming()

    # -- arrivals and losses

    def handle_rank_hello(self, entry: RankHello, session: int | None, now: float) -> None:
        error = self.restarts.check_numbers(entry) or self.ranks.check_hello(entry, self.terms)
        if error is not None:
            return self._effects.append(events.RankRefused(entry.rank, error))
        if entry.terms != self.terms:  # check_hello admits other terms only if no rank is alive
            self.terms, self.budget = entry.terms, RestartBudget()
            self.ranks.adopt_world_size(entry.terms.world_size)
        old = self.ranks.rank_of_slot(entry.rank.slot)
        if old is not None and old.is_here and old.rank != entry.rank:
            self.lose_rank(old, "its process has restarted", now)
        self.restarts.skip_seen_numbers(entry.seen, self.terms.stride)
        self.restarts.skip_seen_numbers(entry.generation, self.terms.stride)
        rank = self.ranks.enter_rank(entry, session, now)
        self.ranks.remove_ready(rank)
        self.current.reconnect_rank(rank.rank)
        if entry.is_ready:
            return self._handle_ready(rank, entry.generation, now)
        return self._record_held_generation(rank, entry.generation)

    def handle_stream_end(self, session: int, now: float) -> None:
        rank = self.ranks.rank_of_session(session)
        if rank is None:
            return
        if now < self._held_until:
            self.ranks.close_stream(rank, self._held_until)
        else:
            self.lose_rank(rank, "its connection was lost", now)

    def lose_rank(self, rank: Rank, reason: str, now: float) -> None:
        self.ranks.mark_rank_lost(rank)
        self.progress.remove_rank(rank.rank.slot)
        if self.current.remove_lost(rank.rank, now) and not self._is_over:
            self._break_generation(f"{rank.rank}: {reason}", now, lost=(rank.rank,))
        else:
            self._effects.append(events.RecordChanged())

    # -- messages of ranks

    def handle_rank_message(self, rank_id: RankId, message: events.RankMessage, now: float) -> None:
        rank = self.ranks.find_live(rank_id)
        if rank is None:
            self._effects.append(events.RankRefused(rank_id, self.ranks.why_not_live(rank_id)))
            return
        self.ranks.record_rank_message(rank, now)
        match message:
            case RankHeartbeat(step, phase, progress):
                runs = self.current.is_at_work(rank.rank, self.current.number)
                is_step = step > rank.step and runs
                rank.step, rank.phase = step or rank.step, phase or rank.phase
                if progress is not None and runs:
                    process = Process(rank.rank.incarnation, rank.host, rank.pid)
                    self.progress.add_sample(rank.rank.slot, process, progress, now)
                if is_step:
                    self.current.has_stepped = True
                    self.steps += 1
                    self.restarts.record_step(self.wall_time(now))
            case ReadyReport(generation):
                self._handle_ready(rank, generation, now)
            case FailureReport(generation, reason):
                self._handle_failure(rank, generation, reason, now)
            case FinishReport(generation):
                self._handle_finish(rank, generation)
            case CloseReport():
                if self.terms.is_elastic:
                    self._complete_run(max(0, self.current.number))

    def _record_held_generation(self, rank: Rank, generation: int | None) -> None:
        """Record the generation that a rank reports, if any. Interrupt the rank if that generation has ended."""
        if generation is None:
            return
        rank.generation = generation
        if not self.current.is_at_work(rank.rank, generation):
            self._effects.append(events.Interrupted(generation, "this generation has ended", (rank.rank,)))

    def _handle_ready(self, rank: Rank, generation: int | None, now: float) -> None:
        if not self.current.has_received(rank.rank, generation):
            self._send_generation(rank)
            return
        rank.generation = rank.generation if generation is None else generation
        self.ranks.add_ready(rank, now)
        self.current.mark_ready(rank.rank)
        if not self.current.is_standing:
            return
        # Rule 4.
        size = len(self.current.active)
        may_grow = size < self.terms.target and not self.current.finished
        if may_grow and len(assign(self.ranks, self.current.slots, self.terms, self.current.running)) > size:
            self._break_generation(f"{rank.rank} comes in", now, is_fault=False)
        else:
            self._send_generation(rank)

    def _send_generation(self, rank: Rank) -> None:
        """Send the current generation to a rank, unless an earlier process in the rank's slot was active in it."""
        assert self.current.generation is not None
        if not self.current.is_place_taken(rank.rank):
            self._effects.append(events.GenerationSent(rank.rank, self.current.generation))

    def _handle_failure(self, rank: Rank, generation: int, reason: str, now: float) -> None:
        """Handle a failure of a rank's function. Ignore failures after the generation has broken."""
        if not self.current.can_fail(rank.rank, generation):
            return
        current = self.current
        current.delayed_until = now + self.budget.add_failure(
            self.terms, self.wall_time(now), lasted_s=now - current.began_at, has_stepped=current.has_stepped
        )
        self._break_generation(f"{rank.rank} has failed: {reason}", now, is_failure=True)

    def fail_ranks_behind(self, slots: Iterable[int], reason: str, now: float) -> None:
        """Treat the ranks of `slots` as failed, because they keep the other ranks waiting."""
        for rank in map(self.ranks.rank_of_slot, slots):
            if rank is not None:
                self._handle_failure(rank, self.current.number, reason, now)

    def _handle_finish(self, rank: Rank, generation: int) -> None:
        if not self.current.is_at_work(rank.rank, generation):
            self._record_held_generation(rank, generation)
        elif not self.current.finish_rank(rank.rank):
            self._effects.append(events.RecordChanged())
        else:
            self._complete_run(generation)

    def _complete_run(self, number: int) -> None:
        self.end_run()
        self._effects.append(events.Completed(number, self.live_rank_ids, is_new=True))

    # -- breaking and forming

    @property
    def live_rank_ids(self) -> tuple[RankId, ...]:
        return tuple(sorted(rank.rank for rank in self.ranks.live_ranks))

    def _break_generation(
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
            if self.restarts.add_losses(lost, cause):
                self._effects.append(events.Interrupted(number, cause, (), is_new=True))
            return
        self.current.is_broken = True
        self.restarts.begin_restart(number, cause, self.wall_time(now), lost, is_fault=is_fault)
        running = tuple(sorted(self.current.running))
        self._effects.append(events.Interrupted(number, cause, running, is_new=True, is_failure=is_failure))

    def form_if_ready(self, now: float) -> str:
        """Form the next generation if it is due. Return the reason if the run must stop instead, otherwise ""."""
        if self._is_over:
            return ""
        if self.current.is_broken and (why := self.budget.why_exhausted(self.terms)):
            return f"{why}; the last: {self.restarts.last_cause}"
        self._decision = self._decide_next(now)
        if self._decision.verdict is events.RunVerdict.READY:
            return self._form_generation(self._decision.chosen, now)
        if self._decision.is_hopeless:
            needed = max(self.terms.min_active, self.terms.divisible_by)
            return f"min_active: {len(self.ranks.ready)} ranks are left, {needed} are needed"
        return ""

    def _decide_next(self, now: float) -> GenerationDecision:
        return decide_generation(self.ranks, self.current, self.terms, self._decision, now)

    def _form_generation(self, chosen: tuple[RankId, ...], now: float) -> str:
        limit = self.terms.max_iterations
        if limit is not None and self.restarts.formed >= limit:
            return f"max_iterations: {limit} generations were run"
        left_out, before = tuple(sorted(self.current.running)), self.current.number
        generation = self._begin_generation(chosen, now)
        spares = tuple(sorted(rank.rank for rank in self.ranks.ready.values()))
        self._effects.append(events.GenerationFormed(generation, spares))
        if left_out:
            reason = f"generation {generation.number} has formed without it"
            self._effects.append(events.Interrupted(before, reason, left_out))
        return ""

    def _begin_generation(self, chosen: tuple[RankId, ...], now: float) -> Generation:
        members = [rank for rank in map(self.ranks.find_live, chosen) if rank is not None]
        counters = self.restarts.end_restart(
            self.terms.stride,
            self.wall_time(now),
            is_process_restart=is_process_restart(members, self.current, self.restarts),
        )
        generation = Generation(chosen, counters)
        self.current = GenerationState(generation, chosen, began_at=now)
        for rank in self.ranks:
            self.progress.remove_rank(rank.rank.slot)
        for rank in members:
            self.ranks.remove_ready(rank)
            rank.generation = generation.number
        self._decision = self._decide_next(now)
        return generation

    def wall_time(self, now: float) -> float:
        return now + self.config.wall_offset_s
