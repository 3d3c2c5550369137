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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lighthouse.job import events
from lighthouse.job.generations import NAMES_KEPT_S, Generations, Ranks
from lighthouse.job.records import Former, KeySpaces, Membership, Row, RunConfig, RunRecord, SupervisorRecord
from lighthouse_protocol.identity import group_of_supervisor, group_run
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.run import (
    ExcludedHost,
    Generation,
    HelloRejected,
    HostExcluded,
    ProcessLost,
    RankHeartbeat,
    RankHello,
    RankId,
    RunCompleted,
    RunStopped,
    StopAsked,
    SupervisorHeartbeat,
    SupervisorHello,
    SupervisorWelcome,
    ToSupervisor,
)
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, LimitReached, Superseded, WrongState
from lighthouse_protocol.rules.access import digest_of, is_shown

# -- supervisors --------------------------------------------------------------
#
# The supervisors of a run, and its excluded hosts.
#
# 1. One entry a name, of its newest incarnation, kept after its connection. While its stream is open only the
#    supervisor that shows its secret takes its place; after a restart of the lighthouse the name is kept for
#    NAMES_KEPT_S. Then a newer incarnation takes the name, and the older one never gets it back. So of two
#    supervisors that were given one name one goes on, and the other one ends. An incarnation is its supervisor's for
#    good.
# 2. A supervisor that was told a stop ends by it. If it comes again it is told so again, even after the stop was
#    lifted.
# 3. An excluded host has no rank and no supervisor in the run until the run is resumed.
# 4. What a supervisor asks for counts for the others if it has a part in the run: a rank of it has been in a
#    generation, or its group in a quorum of the job, as the secrets show. What another one asks for is its own
#    affair: a stop ends it alone, an exclusion keeps its own name from its host. Only where no part of the run stands
#    yet may any one stop it.

MAX_SUPERVISORS = 4096
FORMER_KEPT = 16  # incarnations of one name
MAX_EXCLUDED = 4096


@dataclass(slots=True, eq=False)
class Supervisor:
    """`secret`: the digest of what it has shown; `entry` is without it. `is_awaited`: the lighthouse has restarted, and
    it has not come back. `refused`: incarnations that have asked for its name, or were told that the run has completed;
    they are of the launch that it is of. `has_part`: a rank of it has been in a generation of this launch."""

    entry: SupervisorHello
    session: int | None = None
    former: tuple[str, ...] = ()
    last: SupervisorHeartbeat = field(default_factory=SupervisorHeartbeat)
    secret: str = ""
    is_awaited: bool = False
    refused: tuple[str, ...] = ()
    has_part: bool = False


class Supervisors:
    def __init__(
        self,
        records: Iterable[SupervisorRecord] = (),
        excluded: Iterable[ExcludedHost] = (),
        ending: Mapping[str, str] | None = None,
        kept_until: float = -math.inf,
    ) -> None:
        """`kept_until`: until then the names of `records` are kept for their supervisors."""
        self._names = {
            each.hello.name: Supervisor(
                each.hello,
                former=each.former,
                secret=each.secret,
                is_awaited=True,
                refused=each.refused,
                has_part=each.has_part,
            )
            for each in records
        }
        self._slots = sum(len(each.entry.slots) for each in self._names.values())
        self._kept_until = kept_until
        self._sessions: dict[int, Supervisor] = {}
        self._excluded = {(host.host, host.supervisor): host for host in excluded}
        self._ending = dict(ending or {})

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(self._names.values())

    @property
    def is_empty(self) -> bool:
        """None was ever here."""
        return not self._names

    @property
    def are_connected(self) -> bool:
        return bool(self._sessions)

    @property
    def excluded(self) -> tuple[ExcludedHost, ...]:
        return tuple(self._excluded.values())

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Of all that were ever here."""
        return tuple(one for each in self for one in (each.entry.incarnation, *each.former, *each.refused))

    def slots_of(self, replica_id: str) -> list[int]:
        """Those of the ranks of that replica group, in their order."""
        own = (each.entry for each in self if replica_id in (each.entry.name, group_of_supervisor(each.entry.name)))
        return sorted(slot for entry in own for slot in entry.slots)

    def records(self) -> tuple[SupervisorRecord, ...]:
        return tuple(
            SupervisorRecord(each.entry, each.former, each.secret, each.refused, each.has_part) for each in self
        )

    # -- coming and going

    def refusal(self, entry: SupervisorHello, now: float) -> LighthouseError | None:
        """Why it may not come in. DuplicateReplica: not now; the one of that name may be gone, and not missed yet."""
        known = self._names.get(entry.name)
        if known is not None and self._keeps(known, entry, now):
            return DuplicateReplica(
                f"supervisor {entry.name} is already running on {known.entry.host or 'an unnamed host'}; the one on "
                f"{entry.host or 'an unnamed host'} has the same name: end one of them, or give each its own "
                "--replica-id. If the first one died, the name is free as soon as the lighthouse has detected that"
            )
        if known is not None and entry.incarnation in known.former:
            return _superseded(entry, known.entry)
        if known is None and len(self._names) >= MAX_SUPERVISORS:
            return LimitReached(f"name: {entry.name} would be supervisor {MAX_SUPERVISORS + 1} of this run")
        slots = self._slots + len(entry.slots) - (len(known.entry.slots) if known is not None else 0)
        if slots > MAX_GROUP_WORLD_SIZE:
            return LimitReached(
                f"slots: with those of {entry.name} the supervisors of this run start {slots} ranks; at most "
                f"{MAX_GROUP_WORLD_SIZE}"
            )
        return self.why_excluded(entry.host or entry.name, entry.name)

    def is_impostor(self, entry: SupervisorHello) -> bool:
        """It comes with the incarnation of the one that has its name, and without the secret."""
        known = self._names.get(entry.name)
        is_named = known is not None and known.entry.incarnation == entry.incarnation
        return known is not None and is_named and bool(known.secret) and not is_shown(entry.secret, known.secret)

    def refuse(self, entry: SupervisorHello) -> bool:
        """It was not taken in. Whether it asked for a name that has another supervisor, and was not known."""
        known = self._names.get(entry.name)
        if known is None or entry.incarnation in (known.entry.incarnation, *known.former, *known.refused):
            return False
        known.refused = (*known.refused, entry.incarnation)[-FORMER_KEPT:]
        return True

    def _keeps(self, known: Supervisor, entry: SupervisorHello, now: float) -> bool:
        """Its name, or its incarnation, from another one."""
        if not known.secret or is_shown(entry.secret, known.secret):
            return False
        is_there = known.session is not None or (known.is_awaited and now < self._kept_until)
        return is_there or entry.incarnation == known.entry.incarnation

    def shift(self, by_s: float) -> None:
        """The lighthouse was paused: no supervisor could come back for that long."""
        self._kept_until += by_s

    def enter(
        self, entry: SupervisorHello, session: int, *, has_part: bool = False
    ) -> tuple[int, LighthouseError] | None:
        """Take it in; an older stream of that name that is to be ended, and why. `has_part`: a rank of it is in the
        present generation."""
        entry, secret = replace(entry, secret=""), digest_of(entry.secret)
        known = self._names.get(entry.name)
        self._slots += len(entry.slots) - (len(known.entry.slots) if known is not None else 0)
        known = known or self._names.setdefault(entry.name, Supervisor(entry))
        older, before = known.session, known.entry
        if before.incarnation != entry.incarnation:
            known.former = (*known.former, before.incarnation)[-FORMER_KEPT:]
        known.has_part = has_part or (known.has_part and known.secret == secret)
        known.entry, known.session, known.secret, known.is_awaited = entry, session, secret, False
        self._sessions[session] = known
        if older is None:
            return None
        del self._sessions[older]
        if before.incarnation == entry.incarnation:
            return older, Superseded(f"supervisor {entry.name} has come by another stream; this one ends")
        return older, _superseded(before, entry)

    def take_part(self, secrets: Collection[str]) -> None:
        """A generation has formed, of ranks that have shown these."""
        for each in self:
            each.has_part = each.has_part or each.secret in secrets

    def of_session(self, session: int) -> Supervisor | None:
        """None: it was not taken in, or has another stream by now."""
        return self._sessions.get(session)

    def hear(self, session: int, heartbeat: SupervisorHeartbeat) -> None:
        if (known := self._sessions.get(session)) is not None:
            known.last = heartbeat

    @property
    def budget_used(self) -> float:
        """Of the one that is connected, and has used up most of its restarts."""
        return max((known.last.budget_used for known in self._sessions.values()), default=0.0)

    def end(self, session: int) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            known.session = None

    # -- stops

    @property
    def connected(self) -> set[str]:
        return {known.entry.incarnation for known in self._sessions.values()}

    @property
    def ending(self) -> Mapping[str, str]:
        """Incarnations, and the reason of the stop that each was told."""
        return dict(self._ending)

    def stop(self, reason: str, incarnations: Iterable[str]) -> bool:
        """They end by it. Whether that is new."""
        new = [each for each in sorted(incarnations) if each not in self._ending]
        self._ending |= dict.fromkeys(new, reason)
        for oldest in list(self._ending)[:-MAX_SUPERVISORS]:
            del self._ending[oldest]
        return bool(new)

    def stopped_by(self, incarnation: str) -> str | None:
        return self._ending.get(incarnation)

    def name_of(self, incarnation: str) -> str:
        """Of the supervisor with that incarnation, now or before; empty: none had it."""
        names = (each.entry.name for each in self if incarnation in (each.entry.incarnation, *each.former))
        return next(names, "")

    def secret_of(self, name: str) -> str:
        """The digest of what that one has shown; empty: nothing, or there is none."""
        known = self._names.get(name)
        return known.secret if known is not None else ""

    def incarnation_of(self, name: str) -> str:
        """Of the newest; empty: there is none."""
        known = self._names.get(name)
        return known.entry.incarnation if known is not None else ""

    # -- hosts

    def exclude(self, host: str, reason: str, at: float, supervisor: str = "") -> bool:
        """`supervisor`: the only one that it holds for; empty: for all. Whether that is new."""
        if (host, supervisor) in self._excluded or len(self._excluded) >= MAX_EXCLUDED:
            return False
        self._excluded[host, supervisor] = ExcludedHost(host, reason, at, supervisor)
        return True

    def why_excluded(self, host: str, supervisor: str) -> WrongState | None:
        """`supervisor`: the name of the one that comes, or whose rank comes; empty: there is none."""
        excluded = self._excluded.get((host, "")) or self._excluded.get((host, supervisor))
        if excluded is None:
            return None
        whom = f" for {excluded.supervisor}" if excluded.supervisor else ""
        return WrongState(
            f"host: {host} is excluded from this run{whom}: {excluded.reason}; "
            "repair it, then re-admit it with `lighthouse resume`"
        )

    def lift(self) -> bool:
        """Let all hosts in again. Whether there was one to let in."""
        had, self._excluded = bool(self._excluded), {}
        return had


def _superseded(older: SupervisorHello, newer: SupervisorHello) -> Superseded:
    return Superseded(
        f"supervisor {older.name} on {older.host or 'an unnamed host'} has a successor of that name on "
        f"{newer.host or 'an unnamed host'}; end this one, or give each its own --replica-id"
    )


# -- launches -----------------------------------------------------------------
#
# Which processes belong to which launch of a run.
#
# A completed run is launched anew by the first process that knows nothing of it: a supervisor that was never here,
# nor a rank of it; or a rank of attempt 0 that was told no number, of no supervisor that was here. Every process of
# the launch before is told that its launch was completed.


class Launches:
    def __init__(self, former: Former | None = None) -> None:
        self.former = former

    def begin(self, completed: int, ranks: Ranks, supervisors: Supervisors) -> None:
        """The present launch becomes the former one; generation `completed` was its last."""
        self.former = Former(completed, _incarnations(ranks, supervisors))

    def completed_before(self, entry: RankHello) -> int | None:
        """The generation that completed this process's launch, if that was the former one."""
        former = self.former
        if former is None:
            return None
        told = [number for number in (entry.seen, entry.generation) if number is not None]
        is_of = entry.rank.supervisor in former.incarnations or any(number <= former.number for number in told)
        return former.number if is_of else None

    def completed_for(self, supervisor: str) -> int | None:
        """The same for a supervisor, by its incarnation."""
        former = self.former
        return former.number if former is not None and supervisor in former.incarnations else None

    @staticmethod
    def knows(supervisor: str, ranks: Ranks, supervisors: Supervisors) -> bool:
        """Whether it, or a rank of it, was in the present launch."""
        return supervisor in _incarnations(ranks, supervisors)

    def is_first(self, entry: RankHello, ranks: Ranks, supervisors: Supervisors) -> bool:
        """Whether this process knows nothing of the present launch."""
        return entry.is_first and not (self.knows(entry.rank.supervisor, ranks, supervisors) or ranks.knows(entry.rank))


def _incarnations(ranks: Ranks, supervisors: Supervisors) -> tuple[str, ...]:
    """Of the supervisors that were here, and of those whose ranks were."""
    return tuple(dict.fromkeys((*supervisors.incarnations, *(rank.rank.supervisor for rank in ranks))))


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
        self._effects: list[events.RunEffect] = []
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

    def handle(self, event: events.RunEvent, now: float) -> Sequence[events.RunEffect]:
        if isinstance(event, events.WasLate):  # before anything lapses by it
            self.generations.was_late(event.by_s, now)
            self.supervisors.shift(event.by_s)
        self.generations.pass_time(now)
        self._dispatch(event, now)
        is_beat = isinstance(event, events.RankSaid) and isinstance(event.message, RankHeartbeat)
        return self._done(now, settles=bool(self._effects) or not is_beat or self.generations.is_due(now))

    def tick(self, now: float) -> Sequence[events.RunEffect]:
        self.generations.pass_time(now)
        return self._done(now)

    def deadline(self, now: float) -> float | None:
        """When to call tick next; after `now`, once handle or tick was called for `now`."""
        return self.generations.deadline(now)

    def _dispatch(self, event: events.RunEvent, now: float) -> None:
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

    def _emit(self, effect: events.RunEffect) -> None:
        match effect:
            case events.GenerationFormed(generation):
                self.keys.advance(generation.number)
                self.supervisors.take_part(self._secrets_of(generation))
            case events.Completed(number, is_new=True):
                self.completed = number
            case _:
                pass
        self._effects.append(effect)

    def _done(self, now: float, *, settles: bool = True) -> Sequence[events.RunEffect]:
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
