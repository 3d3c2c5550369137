"""One run, whole: its generations (generations.py), and around them supervisors, hosts that are given up, launches.

1. A run may have supervisors without ranks: stop, incidents and exclusion are theirs, too.
2. What a supervisor reports of a process that has died explains the incident that its loss began. Where the process is
   no rank of a generation, that is an incident of its own, which ends no generation and counts nowhere.
3. A completed run stays completed for every process of its launch, whenever it comes, and whatever has restarted. It is
   launched anew by a process that knows nothing of it (launches.py).
4. A supervisor that is told a stop, itself or by one of its ranks, ends by it, and so does one that asks for a stop:
   what such a supervisor asks after the stop has been lifted is that stop's echo.
5. What is told is durable first: where an effect changes the record, a `RecordDue` stands before all others.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from lighthouse.members.rules.identity import Membership
from lighthouse.runs.rules import events
from lighthouse.runs.rules.config import RunConfig
from lighthouse.runs.rules.generations import Generations
from lighthouse.runs.rules.key_space import KeySpaces, Row
from lighthouse.runs.rules.launches import Launches
from lighthouse.runs.rules.ranks import NAMES_KEPT_S
from lighthouse.runs.rules.record import RunRecord
from lighthouse.runs.rules.supervisors import Supervisors
from lighthouse_protocol.identity import group_run
from lighthouse_protocol.messages.run import (
    Generation,
    HelloRejected,
    RankHeartbeat,
    RankHello,
    RankId,
    RunCompleted,
    RunStopped,
)
from lighthouse_protocol.messages.supervisor import (
    HostExcluded,
    ProcessLost,
    StopAsked,
    SupervisorHello,
    SupervisorWelcome,
    ToSupervisor,
)
from lighthouse_protocol.refusals import LighthouseError, WrongState
from lighthouse_protocol.rules.proof import digest_of


class RunMachine:
    """Time is the caller's monotonic clock and never goes back."""

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        record: RunRecord | None = None,
        keys: Sequence[Row] = (),
        now: float = 0.0,
        make_id: Callable[[float], str] = str,
        began_at: float | None = None,
    ) -> None:
        """`record` and `keys`: what an earlier lighthouse has written down. `make_id`: as of RestartLog. `began_at`:
        when this lighthouse began to serve runs; None: now. A machine that nobody has come into is made anew by the
        next attempt, and must not keep the names anew by that."""
        record = record or RunRecord()
        kept_until = (now if began_at is None else began_at) + NAMES_KEPT_S
        self.config = config or RunConfig()
        self.stop = record.stop
        self.completed = record.completed
        self.generations = Generations(self.config, record, now, self._emit, make_id)
        self.supervisors = Supervisors(record.supervisors, record.excluded, record.ending, kept_until)
        self.launches = Launches(record.former)
        self.keys = KeySpaces(self.generations.current.number, keys)
        self._effects: list[events.Effect] = []
        if self._is_over:
            self.generations.end()

    # -- what it is

    @property
    def is_quiet(self) -> bool:
        """No process is here; what is to be kept is in the record."""
        return self.generations.ranks.is_empty and not self.supervisors.are_connected

    @property
    def _is_over(self) -> bool:
        return self.stop is not None or self.completed is not None

    def active_slots(self, name: str, ranks: Collection[int]) -> tuple[int, ...]:
        """Of these ranks of a replica group, or slots of this run, by its name. A group that restarts by itself has its
        ranks as slots, and its supervisor in the run that it shares."""
        is_own = self.supervisors.is_empty and self.config.run.endswith(group_run("", name))
        of_group = dict(enumerate(self.supervisors.slots_of(name)))
        slots = set(ranks) if is_own or name == self.config.run else {of_group.get(rank) for rank in ranks}
        return tuple(slot for slot in self.generations.current.slots if slot in slots)

    def verdict(self, now: float) -> events.RunVerdict:
        if self.stop is not None:
            return events.RunVerdict.STOPPED
        if self.completed is not None:
            return events.RunVerdict.COMPLETED
        return self.generations.verdict(now)

    def record(self, now: float) -> RunRecord:
        generations = self.generations
        return RunRecord(
            counters=generations.restarts.counters,
            terms=generations.terms,
            generation=generations.current.generation,
            is_broken=generations.current.is_broken,
            formed=generations.restarts.formed,
            stop=self.stop,
            ranks=generations.ranks.records(self.config.wall_offset_s),
            restarts=generations.restarts.restarts,
            finished=tuple(sorted(generations.current.finished)),
            completed=self.completed,
            supervisors=self.supervisors.records(),
            excluded=self.supervisors.excluded,
            former=self.launches.former,
            ending=self.supervisors.ending,
            failed_at=generations.budget.failed_at,
        )

    def placed(self, entry: RankHello) -> RankHello:
        """With the slot that it gets, where slots are the lighthouse's to give."""
        return self.generations.ranks.placed(entry)

    def impostor(self, entry: RankHello, now: float) -> LighthouseError | None:
        """Why it is not the rank that it says it is, or not of the supervisor whose slot it wants; None: it may be."""
        return self.generations.ranks.impostor(entry, now)

    # -- events and time

    def handle(self, event: events.Event, now: float) -> Sequence[events.Effect]:
        if isinstance(event, events.WasLate):  # before anything lapses by it
            self.generations.was_late(event.by_s, now)
            self.supervisors.shift(event.by_s)
        self.generations.pass_time(now)
        self._dispatch(event, now)
        is_beat = isinstance(event, events.RankSaid) and isinstance(event.message, RankHeartbeat)
        return self._done(now, settles=bool(self._effects) or not is_beat or self.generations.is_due(now))

    def tick(self, now: float) -> Sequence[events.Effect]:
        self.generations.pass_time(now)
        return self._done(now)

    def deadline(self, now: float) -> float | None:
        """When to call tick next; after `now`, once handle or tick was called for `now`."""
        return self.generations.deadline(now)

    def _dispatch(self, event: events.Event, now: float) -> None:
        match event:
            case events.RankJoined(entry, session):
                self._enter(entry, session, now)
            case events.RankSaid(rank, message):
                if not self._tell_end(rank):
                    self.generations.hear(rank, message, now)
            case events.SessionEnded(session):
                self.generations.end_session(session, now)
            case events.RankLost():
                self._lose(event, now)
            case events.RanksBehind(slots, reason):
                self.generations.fail_behind(slots, reason, now)
            case events.SupervisorJoined(entry, session):
                self._supervise(entry, session, now)
            case events.SupervisorEnded(session):
                self.supervisors.end(session)
            case events.StopAsked(reason, who):
                self._stop(reason, who)
            case events.SupervisorAsked():
                self._hear_supervisor(event, now)
            case events.ResumeAsked():
                self._resume()
            case events.WasLate():
                pass

    def _emit(self, effect: events.Effect) -> None:
        match effect:
            case events.GenerationFormed(generation):
                self.keys.advance(generation.number)
                self.supervisors.take_part(self._secrets_of(generation))
            case events.Completed(number, is_new=True):
                self.completed = number
            case _:
                pass
        self._effects.append(effect)

    def _done(self, now: float, *, settles: bool = True) -> Sequence[events.Effect]:
        if settles and (why := self.generations.settle(now)):
            self._stop(why, "")
        effects, self._effects = self._effects, []
        if any(map(events.changes_record, effects)):
            return [events.RecordDue(self.record(now)), *effects]
        return effects

    # -- ranks

    def _enter(self, entry: RankHello, session: int | None, now: float) -> None:
        ranks = self.generations.ranks
        if (number := self.launches.completed_before(entry)) is not None:
            self._emit(events.Completed(number, (entry.rank,)))
        else:
            if self._may_begin_anew and self.launches.is_first(entry, ranks, self.supervisors):
                self._begin_anew()
            error = None if self._is_over else self._why_excluded(entry) or self._clash(entry.rank)
            if error is not None:
                self._emit(events.RankRefused(entry.rank, error))
            elif not self._tell_end(entry.rank):
                self.generations.enter(entry, session, now)
        self._tell_stop(_supervisors((entry.rank,)))

    def _why_excluded(self, entry: RankHello) -> WrongState | None:
        return self.supervisors.why_excluded(entry.host, self.supervisors.name_of(entry.rank.supervisor))

    def _clash(self, rank: RankId) -> WrongState | None:
        """Two replica groups have brought that slot."""
        old = self.generations.ranks.of_slot(rank.slot)
        if old is None or old.session is None:
            return None
        theirs, name = self.supervisors.name_of(old.rank.supervisor), self.supervisors.name_of(rank.supervisor)
        if theirs == name or not theirs or not name:
            return None
        return WrongState(
            f"slot: {rank.slot} of this run is a rank of {theirs}, and also of {name}; if each group "
            f'restarts by itself use Wrapper(restart_scope="group"), if all ranks restart together give {name} its '
            "own --slot-offset"
        )

    def _tell_end(self, rank: RankId) -> bool:
        """Whether the run is over, which that rank is told."""
        if self.stop is not None:
            self._emit(events.Stopped(self.stop, (rank,)))
        elif self.completed is not None:
            self._emit(events.Completed(self.completed, (rank,)))
        return self._is_over

    def _lose(self, event: events.RankLost, now: float) -> None:
        """Of a rank that is here, only its own supervisor can tell."""
        if (rank := self.generations.ranks.get(event.rank)) is not None:
            if rank.secret and rank.secret != self.supervisors.secret_of(event.by):
                return
            self.generations.lose(rank, event.reason, now)
        if not self._is_over:
            self._explain(event, now)

    # -- launches

    @property
    def _may_begin_anew(self) -> bool:
        is_free = not self.generations.ranks.are_connected and not self.supervisors.are_connected
        return self.completed is not None and self.stop is None and is_free

    def _begin_anew(self) -> None:
        assert self.completed is not None
        self.launches.begin(self.completed, self.generations.ranks, self.supervisors)
        self.supervisors = Supervisors(excluded=self.supervisors.excluded)
        self.generations.begin_anew()
        self.keys = KeySpaces()
        self.completed = None

    # -- the stop

    def _stop(self, reason: str, who: str) -> None:
        """Rule 4. The first reason stays."""
        if self._is_over:
            return
        of_ranks = _supervisors(rank.rank for rank in self.generations.ranks.here if rank.session is not None)
        self.supervisors.stop(reason, of_ranks | self.supervisors.connected)
        self.stop = RunStopped(reason, who, self.generations.current.number)
        self.generations.current.is_broken = True
        self.generations.end()
        self._emit(events.Stopped(self.stop, self.generations.everyone, is_new=True))

    def _tell_stop(self, supervisors: set[str]) -> None:
        """They, or one of their ranks, are told while the run is stopped."""
        if self.stop is not None and self.supervisors.stop(self.stop.reason, supervisors):
            self._emit(events.RecordChanged())

    def _resume(self) -> None:
        had_excluded = self.supervisors.lift()
        if self.stop is None and not had_excluded:
            return
        if self.stop is not None:
            self.stop = None
            self.generations.resume()
        self._emit(events.Resumed())

    # -- supervisors

    def _supervise(self, entry: SupervisorHello, session: int, now: float) -> None:
        ranks = self.generations.ranks
        if self._may_begin_anew and not self.launches.knows(entry.incarnation, ranks, self.supervisors):
            self._begin_anew()
        if (said := self._why_not(entry, now)) is not None:
            self._emit(events.SupervisorTold(session, said))
            self._tell_stop({entry.incarnation})
            is_of_this_launch = isinstance(said, HelloRejected) or self.completed is not None
            if is_of_this_launch and self.supervisors.refuse(entry):
                self._emit(events.RecordChanged())
            return
        generation = self.generations.current.generation
        has_part = generation is not None and digest_of(entry.secret) in self._secrets_of(generation)
        replaced = self.supervisors.enter(entry, session, has_part=has_part)
        if replaced is not None:
            self._emit(events.SupervisorTold(replaced[0], HelloRejected(replaced[1])))
        self._emit(events.SupervisorTold(session, SupervisorWelcome(self.config.beat_interval_s)))
        self._emit(events.RecordChanged())

    def _why_not(self, entry: SupervisorHello, now: float) -> ToSupervisor | None:
        if self.stop is not None:
            return self.stop
        if self.completed is not None:
            return RunCompleted(self.completed)
        if (number := self.launches.completed_for(entry.incarnation)) is not None:
            return RunCompleted(number)
        reason = self.supervisors.stopped_by(entry.incarnation)
        if reason is not None and not self.supervisors.is_impostor(entry):
            return RunStopped(reason, "the run, which was resumed since", self.generations.current.number)
        error = self.supervisors.refusal(entry, now)
        return None if error is None else HelloRejected(error)

    def _explain(self, event: events.RankLost, now: float) -> None:
        """Rule 2."""
        generations = self.generations
        generations.restarts.explain(
            ProcessLost(event.rank, event.reason, event.output),
            event.by,
            generations.current.number,
            generations.wall(now),
            is_rank=generations.ranks.knows(event.rank),
        )

    def has_say(self, session: int, membership: Membership) -> bool:
        """Whether a stop that this supervisor asks for counts for the whole run. Rule 4 of supervisors.py."""
        is_open = membership is Membership.OPEN and self.generations.current.generation is None
        return is_open or self._has_part(session, membership)

    def _has_part(self, session: int, membership: Membership) -> bool:
        known = self.supervisors.of_session(session)
        return known is not None and (known.has_part or membership is Membership.MEMBER)

    def _secrets_of(self, generation: Generation) -> set[str]:
        """The digests of what its ranks have shown; without those that have shown nothing."""
        found = (self.generations.ranks.of_slot(rank.slot) for rank in generation.active)
        return {rank.secret for rank in found if rank is not None and rank.secret and rank.rank in generation.active}

    def _hear_supervisor(self, event: events.SupervisorAsked, now: float) -> None:
        known = self.supervisors.of_session(event.session)
        if known is None or self._is_over:
            return
        match event.message:
            case StopAsked(reason):
                if self.supervisors.stopped_by(known.entry.incarnation) is not None:
                    return
                if self.has_say(event.session, event.membership):
                    self._stop(reason, known.entry.name)
                else:
                    self._stop_alone(event.session, known.entry, reason)
            case HostExcluded(reason):
                self._exclude(known.entry, reason, now, is_for_all=self._has_part(event.session, event.membership))

    def _stop_alone(self, session: int, entry: SupervisorHello, reason: str) -> None:
        self.supervisors.stop(reason, {entry.incarnation})
        self._emit(events.OutsiderHeard(entry.name, "its stop ends it alone"))
        stop = RunStopped(reason, entry.name, self.generations.current.number)
        self._emit(events.SupervisorTold(session, stop))
        self._emit(events.RecordChanged())

    def _exclude(self, entry: SupervisorHello, reason: str, now: float, *, is_for_all: bool) -> None:
        host, whom = entry.host or entry.name, "" if is_for_all else entry.name
        if not self.supervisors.exclude(host, reason, self.generations.wall(now), whom):
            return
        if whom:
            self._emit(events.OutsiderHeard(whom, f"host {host} is excluded for it alone"))
        for rank in [rank for rank in self.generations.ranks.here if rank.host == host]:
            if is_for_all or self.supervisors.name_of(rank.rank.supervisor) == whom:
                self.generations.lose(rank, f"its host {host} is excluded: {reason}", now)
        self._emit(events.RecordChanged())


def _supervisors(ranks: Iterable[RankId]) -> set[str]:
    """Of those ranks that were started by one."""
    return {rank.supervisor for rank in ranks if rank.is_supervised}
