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
from collections.abc import Callable, Iterable

from lighthouse.members.rules.silence import CLOSINGS_HELD_S
from lighthouse.runs.rules import events
from lighthouse.runs.rules.config import RunConfig
from lighthouse.runs.rules.formation import FormationClock, begins_by_restart, choose
from lighthouse.runs.rules.generation import GenerationState
from lighthouse.runs.rules.ranks import Rank, Ranks
from lighthouse.runs.rules.record import RunRecord
from lighthouse.runs.rules.restart_log import RestartLog
from lighthouse_protocol.messages.run import (
    CloseReport,
    FailureReport,
    FinishReport,
    Generation,
    RankHeartbeat,
    RankHello,
    RankId,
    ReadyReport,
)
from lighthouse_protocol.rules.group_progress import GroupProgress, Process
from lighthouse_protocol.rules.restart_budget import RestartBudget


class Generations:
    """A part of the run's machine: what it has to tell goes to `emit`. Nothing is done once the run is over."""

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        now: float,
        emit: Callable[[events.Effect], None],
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
        self.progress.lose(rank.rank.slot)
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
                    self.progress.take(rank.rank.slot, process, progress, now)
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
        delay_s = self.budget.fail(self.terms, self.wall(now), lasted_s=lasted_s, has_stepped=self._has_stepped)
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
            self.progress.lose(rank.rank.slot)
        for rank in members:
            self.ranks.run(rank)
            rank.generation = generation.number
        self._formation = FormationClock()
        self._began_at, self._has_stepped = now, False
        return generation

    def wall(self, now: float) -> float:
        return now + self.config.wall_offset_s
