"""Generations of one run: restarts in the process and under a supervisor, spares, the stop and the completion.

1. Here alone numbers are given out, written down before they are told, and never twice (iteration.py).
2. A generation stands until one of its active ranks is lost or fails: then it is broken, the others are interrupted,
   and say ready. They may also say ready by themselves. A spare's death breaks nothing (generation_life.py).
3. When the next one forms, and of whom: advance.py, spares.py. It is told to all of them at once.
4. Who comes while a generation stands is its spare, and told so at once, unless the generation would be larger with it:
   then it is broken for that, which is no incident.
5. Who is of the present generation and has not heard of it is handed it again. Nobody waits for a past number, and
   whoever holds another one is told that it is over.
6. Too few for too long, or `max_iterations` generations: the run is stopped. A stop stays until it is lifted.
7. A generation that somebody has finished is not broken for who comes in. When all have, the run stays completed
   (run_machine.py: unless it is launched anew).

All is read from what ranks say that they hold, again and again. An event that changes nothing costs O(1), a generation
O(n log n) once.
"""

from collections.abc import Sequence

from lighthouse.members.rules.silence import CLOSINGS_HELD_S
from lighthouse.runs.rules import events
from lighthouse.runs.rules.config import GenerationConfig
from lighthouse.runs.rules.formation import Advance, begins_by_restart, choose
from lighthouse.runs.rules.generation import GenerationLife
from lighthouse.runs.rules.key_space import KeySpaces
from lighthouse.runs.rules.ranks import Rank, Ranks
from lighthouse.runs.rules.record import Incident, RunRecord
from lighthouse.runs.rules.restart_log import Ledger
from lighthouse_protocol.messages.run import Entry, Generation, RankId, Stop


class GenerationMachine:
    """One run's generations. Time is the caller's monotonic clock and never goes back."""

    def __init__(
        self, config: GenerationConfig | None = None, *, record: RunRecord | None = None, now: float = 0.0
    ) -> None:
        """`record`: what an earlier lighthouse has written down."""
        record = record or RunRecord()
        self.config = config or GenerationConfig()
        self.terms = record.terms
        self.stop = record.stop
        self.ranks = Ranks(self.config.rank_timeout_s, record.ranks, now)
        here = [rank.rank for rank in self.ranks.here]
        self.life = GenerationLife(record.generation, here, is_broken=record.is_broken, finished=record.finished)
        self.completed = record.completed
        self.ledger = Ledger(record)
        self.keys = KeySpaces(self.life.number)
        self._advance = Advance()
        self._held_until = now

    # -- what it is

    def verdict(self, now: float) -> events.AdvanceVerdict:
        if self.stop is not None:
            return events.AdvanceVerdict.STOPPED
        if self.completed is not None:
            return events.AdvanceVerdict.COMPLETED
        return self._advance.verdict(self.ranks, self.life, self.terms, now)

    def record(self, now: float) -> RunRecord:
        return RunRecord(
            counters=self.ledger.counters,
            terms=self.terms,
            generation=self.life.generation,
            is_broken=self.life.is_broken,
            formed=self.ledger.formed,
            stop=self.stop,
            ranks=self.ranks.records(self.config.wall_offset_s),
            incidents=self.ledger.incidents,
            finished=tuple(sorted(self.life.finished)),
            completed=self.completed,
        )

    # -- events and time

    def handle(self, event: events.GenerationEvent, now: float) -> Sequence[events.GenerationEffect]:
        if isinstance(event, events.WasLate):  # before anything lapses by it
            self._was_late(event.by_s, now)
        effects = self._pass_time(now)
        match event:
            case events.Entered(entry, session):
                effects += self._enter(entry, session, now)
            case events.SessionEnded(session):
                effects += self._end_session(session, now)
            case events.RankLost(rank, reason):
                found = self.ranks.get(rank)
                effects += self._lose(found, reason, now) if found is not None else []
            case events.StopAsked(reason, who):
                effects += self._stop(reason, who, now)
            case events.Beaten() | events.Readied() | events.Failed() | events.Finished():
                effects += self._hear(event, now)
            case _:  # run_machine.py
                pass
        return effects if isinstance(event, events.Beaten) and not effects else effects + self._settle(now)

    def tick(self, now: float) -> Sequence[events.GenerationEffect]:
        return self._pass_time(now) + self._settle(now)

    def deadline(self, now: float) -> float | None:
        """When to call tick next; after `now`, once handle or tick was called for `now`."""
        moments = [self.ranks.next_at(), *([] if self._is_over else self._advance.moments(self.terms))]
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def _pass_time(self, now: float) -> list[events.GenerationEffect]:
        effects: list[events.GenerationEffect] = []
        for rank in self.ranks.lapsed(now):
            effects += self._lose(rank, f"nothing was heard of it for {self.config.rank_timeout_s:g} s", now)
        return effects

    def _was_late(self, by_s: float, now: float) -> None:
        self.ranks.shift(by_s)
        self._advance.shift(by_s)
        self._held_until = now + by_s + CLOSINGS_HELD_S

    # -- coming and going

    def _enter(self, entry: Entry, session: int | None, now: float) -> list[events.GenerationEffect]:
        if (effects := self._tell_end(entry.rank)) is not None:
            return effects
        error = self.ledger.refusal(entry) or self.ranks.refusal(entry, self.terms)
        if error is not None:
            return [events.RankRefused(entry.rank, error)]
        if entry.terms != self.terms:  # it was not refused: nobody is here
            self.terms, self.ranks = entry.terms, Ranks(self.config.rank_timeout_s)
        effects = list[events.GenerationEffect]()
        old = self.ranks.of_slot(entry.rank.slot)
        if old is not None and old.is_here and old.rank != entry.rank:
            effects += self._lose(old, "its process has restarted", now)
        self.ledger.learn(entry.seen, self.terms.stride)
        self.ledger.learn(entry.generation, self.terms.stride)
        rank = self.ranks.enter(entry, session, now)
        self.ranks.run(rank)
        self.life.come_back(rank.rank)
        if entry.is_ready:
            return effects + self._ready(rank, entry.generation, now)
        return effects + self._holds(rank, entry.generation)

    def _end_session(self, session: int, now: float) -> list[events.GenerationEffect]:
        rank = self.ranks.of_session(session)
        if rank is None:
            return []
        if now < self._held_until:
            self.ranks.close(rank, self._held_until)
            return []
        return self._lose(rank, "its connection has ended", now)

    def _lose(self, rank: Rank, reason: str, now: float) -> list[events.GenerationEffect]:
        self.ranks.lose(rank)
        if not self.life.lose(rank.rank):
            return []
        return self._break(f"{rank.rank}: {reason}", now, lost=(rank.rank,))

    # -- what ranks say

    def _hear(
        self, event: events.Beaten | events.Readied | events.Failed | events.Finished, now: float
    ) -> list[events.GenerationEffect]:
        rank = self.ranks.get(event.rank)
        if (effects := self._tell_end(event.rank)) is not None:
            return effects
        if rank is None:
            return [events.RankRefused(event.rank, self.ranks.why_not(event.rank))]
        self.ranks.see(rank, now)
        match event:
            case events.Beaten(_, step, phase):
                is_step = step > rank.step and self.life.runs(rank.rank, self.life.number)
                rank.step, rank.phase = step or rank.step, phase or rank.phase
                return [events.Noted()] if is_step and self.ledger.step(self._wall(now)) else []
            case events.Readied(_, generation):
                return self._ready(rank, generation, now)
            case events.Failed(_, generation, reason):
                return self._fail(rank, generation, reason, now)
            case events.Finished(_, generation):
                return self._finish(rank, generation, now)

    def _holds(self, rank: Rank, generation: int | None) -> list[events.GenerationEffect]:
        """It runs that generation; None: it starts, and will be ready."""
        if generation is None:
            return []
        rank.generation = generation
        if self.life.runs(rank.rank, generation):
            return []
        return [events.Interrupted(generation, "this generation is over", (rank.rank,))]

    def _ready(self, rank: Rank, generation: int | None, now: float) -> list[events.GenerationEffect]:
        if not self.life.has_heard(rank.rank, generation):
            return self._hand(rank)
        rank.generation = rank.generation if generation is None else generation
        self.ranks.wait(rank, now)
        self.life.ready(rank.rank)
        return self._admit(rank, now)

    def _admit(self, rank: Rank, now: float) -> list[events.GenerationEffect]:
        """Rule 4."""
        if not self.life.stands:
            return []
        size = len(self.life.active)
        may_grow = size < self.terms.target and not self.life.finished
        if may_grow and len(choose(self.ranks, self.life, self.terms, with_running=True)) > size:
            return self._break(f"{rank.rank} comes in", now, is_fault=False)
        return self._hand(rank)

    def _hand(self, rank: Rank) -> list[events.GenerationEffect]:
        """Ranks are told by slot, so the successor of one that has finished is told nothing: it waits."""
        assert self.life.generation is not None
        if self.life.is_place_of_another(rank.rank):
            return []
        return [events.GenerationHanded(rank.rank, self.life.generation)]

    def _fail(self, rank: Rank, generation: int, reason: str, now: float) -> list[events.GenerationEffect]:
        """What fails in a broken generation fails because of that."""
        if not self.life.can_fail(rank.rank, generation):
            return []
        return self._break(f"{rank.rank} has failed: {reason}", now)

    def _finish(self, rank: Rank, generation: int, now: float) -> list[events.GenerationEffect]:
        if not self.life.runs(rank.rank, generation):
            return self._holds(rank, generation)
        if not self.life.finish(rank.rank):
            return [events.Noted()]
        self.completed = generation
        return [events.Completed(generation, tuple(sorted(rank.rank for rank in self.ranks.here)), self.record(now))]

    # -- the end of a generation, of the run

    @property
    def _is_over(self) -> bool:
        return self.stop is not None or self.completed is not None

    def _tell_end(self, rank: RankId) -> list[events.GenerationEffect] | None:
        if self.stop is not None:
            return [events.Stopped(self.stop, (rank,))]
        return None if self.completed is None else [events.Completed(self.completed, (rank,))]

    def _break(
        self, cause: str, now: float, *, lost: tuple[RankId, ...] = (), is_fault: bool = True
    ) -> list[events.GenerationEffect]:
        if self._is_over or self.life.generation is None:
            return []
        number = self.life.number
        if self.life.is_broken:
            if self.ledger.worsen(lost, cause):
                return [events.Interrupted(number, cause, (), self.record(now))]
            return []
        self.life.is_broken = True
        self.ledger.begin(Incident(number, cause, self._wall(now), is_fault, lost))
        return [events.Interrupted(number, cause, tuple(sorted(self.life.running)), self.record(now))]

    def _stop(self, reason: str, who: str, now: float) -> list[events.GenerationEffect]:
        """The first reason stays."""
        if self._is_over:
            return []
        self.stop = Stop(reason, who, self.life.number)
        self.life.is_broken = True
        return [events.Stopped(self.stop, tuple(sorted(rank.rank for rank in self.ranks.here)), self.record(now))]

    # -- forming

    def _settle(self, now: float) -> list[events.GenerationEffect]:
        if self._is_over:
            return []
        verdict = self._advance.look(self.ranks, self.life, self.terms, now)
        if verdict is events.AdvanceVerdict.READY:
            return self._form(now)
        if self._advance.is_hopeless(self.terms, now):
            needed = max(self.terms.min_active, self.terms.divisible_by)
            return self._stop(f"min_active: {len(self.ranks.ready)} ranks are left, {needed} are needed", "", now)
        return []

    def _form(self, now: float) -> list[events.GenerationEffect]:
        limit = self.terms.max_iterations
        if limit is not None and self.ledger.formed >= limit:
            return self._stop(f"max_iterations: {limit} generations were run", "", now)
        left_out, before = tuple(sorted(self.life.running)), self.life.number
        generation = self._begin(choose(self.ranks, self.life, self.terms), now)
        spares = tuple(sorted(rank.rank for rank in self.ranks.ready.values()))
        formed = events.GenerationFormed(generation, spares, self.record(now))
        if not left_out:
            return [formed]
        return [formed, events.Interrupted(before, f"generation {generation.number} has formed without it", left_out)]

    def _begin(self, chosen: tuple[RankId, ...], now: float) -> Generation:
        members = [rank for rank in map(self.ranks.get, chosen) if rank is not None]
        counters = self.ledger.form(
            self.terms.stride,
            self._wall(now),
            is_process_restart=begins_by_restart(members, self.life, self.ledger.counters),
        )
        generation = self.life.begin(chosen, counters)
        for rank in members:
            self.ranks.run(rank)
            rank.generation = generation.number
        self._advance = Advance()
        self.keys.advance(generation.number)
        return generation

    def _wall(self, now: float) -> float:
        return now + self.config.wall_offset_s
