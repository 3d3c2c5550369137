"""One run, whole: its generations (generation.py), and around them supervisors, hosts that are given up, launches.

1. A run may have supervisors without ranks: stop, incidents and exclusion are theirs, too.
2. A supervisor's word on a process that has died explains the incident that its loss began. Where the process is no
   rank of a generation, that is an incident of its own, which ends no generation and counts nowhere.
3. A completed run stays completed for all who are of its launch, whenever they come, and whatever has restarted.
   It is launched anew by the first one that knows nothing of it: a supervisor that was never here, nor a rank of it, or
   a rank of attempt 0 that was told no number, of no supervisor that was here; and only while nobody who was here
   before is connected. Numbers go on upwards.
4. Who is told a stop, itself or by one of its ranks, ends by it, and so does who asks for one: what such a supervisor
   asks when the stop has been lifted is that stop's echo.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lighthouse.runs.rules import events
from lighthouse.runs.rules.config import GenerationConfig
from lighthouse.runs.rules.formation import Advance
from lighthouse.runs.rules.generation import GenerationLife
from lighthouse.runs.rules.generations import GenerationMachine
from lighthouse.runs.rules.key_space import KeySpaces, Row
from lighthouse.runs.rules.ranks import Ranks
from lighthouse.runs.rules.record import Former, Incident, RunRecord
from lighthouse.runs.rules.restart_log import evidence
from lighthouse.runs.rules.supervisors import Supervisors
from lighthouse_protocol.messages.run import Done, Entry, RankId, Refusal, Stop
from lighthouse_protocol.messages.supervisor import SupervisorEntry, SupervisorWelcome, ToSupervisor


class RunMachine(GenerationMachine):
    """Time is the caller's monotonic clock and never goes back."""

    def __init__(
        self,
        config: GenerationConfig | None = None,
        *,
        record: RunRecord | None = None,
        keys: Sequence[Row] = (),
        now: float = 0.0,
    ) -> None:
        """`record` and `keys`: what an earlier lighthouse has written down."""
        record = record or RunRecord()
        super().__init__(config, record=record, now=now)
        self.keys = KeySpaces(self.life.number, keys)
        self.supervisors = Supervisors(record.supervisors, record.excluded, record.ending)
        self.former = record.former

    @property
    def is_quiet(self) -> bool:
        """Nobody is here; what is to be kept is in the record."""
        return self.ranks.is_empty and not self.supervisors.are_connected

    def record(self, now: float) -> RunRecord:
        return replace(
            super().record(now),
            supervisors=self.supervisors.records(),
            excluded=self.supervisors.excluded,
            former=self.former,
            ending=self.supervisors.ending,
        )

    def handle(self, event: events.GenerationEvent, now: float) -> Sequence[events.GenerationEffect]:
        match event:
            case events.SupervisorEntered(entry, session):
                return [*self.tick(now), *self._supervise(entry, session)]
            case events.SupervisorEnded(session):
                self.supervisors.end(session)
                return self.tick(now)
            case events.HostExcluded(host, reason):
                return self._exclude(host, reason, now)
            case events.RankLost():
                return [*super().handle(event, now), *self._explain(event, now)]
            case events.ResumeAsked():
                return self._resume(now)
            case events.StopAsked(who=who) if self._is_ending(who):
                return self.tick(now)
            case events.Entered(entry):
                refused = self._refuse(entry)
                effects = super().handle(event, now) if refused is None else [*self.tick(now), refused]
                return [*effects, *self._tell_stop(_supervisors((entry.rank,)))]
            case _:
                return super().handle(event, now)

    # -- launches

    def _refuse(self, entry: Entry) -> events.GenerationEffect | None:
        """Why this process is no rank of what goes on now; it may begin a launch."""
        if self.former is not None and _is_of(self.former, entry):
            return events.Completed(self.former.number, (entry.rank,))
        if self._may_begin_anew and entry.is_first and not self._was_here(entry.rank):
            self._begin_anew()
        if self._is_over or (error := self.supervisors.why_excluded(entry.host)) is None:
            return None
        return events.RankRefused(entry.rank, error)

    @property
    def _may_begin_anew(self) -> bool:
        is_free = not self.ranks.are_connected and not self.supervisors.are_connected
        return self.completed is not None and self.stop is None and is_free

    def _was_here(self, rank: RankId) -> bool:
        return rank.supervisor in self._supervisors_ever or self.ranks.knows(rank)

    @property
    def _supervisors_ever(self) -> tuple[str, ...]:
        """Their incarnations: of those that were here, and of those whose ranks were."""
        ever = (*self.supervisors.incarnations, *(rank.rank.supervisor for rank in self.ranks))
        return tuple(dict.fromkeys(ever))

    def _begin_anew(self) -> None:
        assert self.completed is not None
        self.former = Former(self.completed, self._supervisors_ever)
        self.supervisors = Supervisors(excluded=self.supervisors.excluded)
        self.ranks = Ranks(self.config.rank_timeout_s)
        self.life = GenerationLife()
        self.keys = KeySpaces()
        self.completed = None
        self.ledger.begin_anew()

    # -- the stop

    def _stop(self, reason: str, who: str, now: float) -> list[events.GenerationEffect]:
        """Rule 4."""
        if not self._is_over:
            of_ranks = _supervisors(rank.rank for rank in self.ranks.here if rank.session is not None)
            self.supervisors.stop(reason, of_ranks | self.supervisors.connected)
        return super()._stop(reason, who, now)

    def _tell_stop(self, supervisors: set[str]) -> list[events.GenerationEffect]:
        """They, or one of their ranks, are told while the run is stopped."""
        is_news = self.stop is not None and self.supervisors.stop(self.stop.reason, supervisors)
        return [events.Noted()] if is_news else []

    def _is_ending(self, name: str) -> bool:
        return self.supervisors.stopped_by(self.supervisors.incarnation_of(name)) is not None

    def _resume(self, now: float) -> list[events.GenerationEffect]:
        effects: list[events.GenerationEffect] = [*self.tick(now)]
        had_excluded = self.supervisors.lift()
        if self.stop is None and not had_excluded:
            return effects
        if self.stop is not None:
            self.stop = None
            self._advance = Advance()  # who waits begins to wait now
        return [*effects, events.Resumed(self.record(now)), *self._settle(now)]

    # -- supervisors

    def _supervise(self, entry: SupervisorEntry, session: int) -> list[events.GenerationEffect]:
        if self._may_begin_anew and entry.incarnation not in self._supervisors_ever:
            self._begin_anew()
        if (said := self._why_not(entry)) is not None:
            return [events.SupervisorTold(session, said), *self._tell_stop({entry.incarnation})]
        replaced = self.supervisors.enter(entry, session)
        welcome = events.SupervisorTold(session, SupervisorWelcome(self.config.beat_interval_s))
        ended = [] if replaced is None else [events.SupervisorTold(replaced[0], Refusal(replaced[1]))]
        return [*ended, welcome, events.Noted()]

    def _why_not(self, entry: SupervisorEntry) -> ToSupervisor | None:
        if self.stop is not None:
            return self.stop
        if self.completed is not None:
            return Done(self.completed)
        if self.former is not None and entry.incarnation in self.former.incarnations:
            return Done(self.former.number)
        if (reason := self.supervisors.stopped_by(entry.incarnation)) is not None:
            return Stop(reason, "the run, which was resumed since", self.life.number)
        error = self.supervisors.refusal(entry)
        return None if error is None else Refusal(error)

    def _explain(self, event: events.RankLost, now: float) -> list[events.GenerationEffect]:
        """Rule 2."""
        if self._is_over:
            return []
        is_news = self.ledger.explain(event.rank, event.reason, event.output)
        if is_news is None and not self.ranks.knows(event.rank):
            by = f" of {event.by}" if event.by else ""
            cause, lines = f"{event.rank}{by}: {event.reason}", evidence(event.rank, event.reason, event.output)
            self.ledger.note(
                Incident(
                    self.life.number,
                    cause,
                    self._wall(now),
                    lost=(event.rank,),
                    evidence=lines,
                    ends_nothing=True,
                )
            )
            is_news = True
        return [events.Noted()] if is_news else []

    def _exclude(self, host: str, reason: str, now: float) -> list[events.GenerationEffect]:
        effects: list[events.GenerationEffect] = [*self.tick(now)]
        if self._is_over or not self.supervisors.exclude(host, reason, self._wall(now)):
            return effects
        for rank in [rank for rank in self.ranks.here if rank.host == host]:
            effects += self._lose(rank, f"its host {host} is excluded: {reason}", now)
        return [*effects, *self._settle(now), events.Noted()]


def _supervisors(ranks: Iterable[RankId]) -> set[str]:
    """Of those ranks that were started by one."""
    return {rank.supervisor for rank in ranks if rank.supervisor != rank.incarnation}


def _is_of(former: Former, entry: Entry) -> bool:
    told = [number for number in (entry.seen, entry.generation) if number is not None]
    return entry.rank.supervisor in former.incarnations or any(number <= former.number for number in told)
