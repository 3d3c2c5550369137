"""State machine of one run, with its generations, supervisors, excluded hosts and launches.

A generation is one attempt to run the user's function on a set of ranks (generations.py). A launch is one start of the
run by its users. It ends when the run is completed.

1. A run may have supervisors but no ranks. Stops, incidents and exclusions work without ranks, too.
2. A supervisor's report on a dead process becomes evidence of the incident in which the process was lost. If the
   process is not a rank of a generation, the report is a separate incident. It ends no generation and changes no
   counter.
3. A completed run stays completed for every process of its launch, even for late ones and after restarts. Each
   process is notified that its launch is completed. Only a process without earlier contact with the run starts another
   launch. This is either a supervisor if neither it nor any of its ranks has connected before, or a rank of attempt 0
   without a generation number if its supervisor has not connected before.
4. A supervisor that receives a stop, directly or through one of its ranks, exits, and so does one that requests a stop.
   If the run has been resumed, another stop request from that supervisor repeats the old one and is ignored.
5. A record is stored before any message that depends on it is sent. `RecordDue` therefore precedes all other effects.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lighthouse.job import events
from lighthouse.job.generations import NAMES_KEPT_S, Generations
from lighthouse.job.records import KeySpaces, Membership, PreviousLaunch, Row, RunConfig, RunRecord, Supervisor
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

MAX_SUPERVISORS = 4096
FORMER_KEPT = 16  # incarnations of one name
MAX_EXCLUDED = 4096


class Supervisors:
    """Supervisors of a run, and its excluded hosts.

    1. A name belongs to the newest incarnation that claimed it, even after that incarnation disconnects. A newer
       incarnation takes the name over, and the older one never gets it back. So if two supervisors use the same name,
       one continues and the other exits. There are two exceptions. While the owner's stream is open, a supervisor must
       present the owner's secret to take over. For NAMES_KEPT_S after a restart of the lighthouse, the name is
       reserved for its previous owner. An incarnation always belongs to the supervisor that used it first.
    2. A supervisor that received a stop exits. If the supervisor reconnects, it receives the stop again, even if the
       run has been resumed.
    3. An excluded host has no rank and no supervisor in the run until the run is resumed.
    4. A supervisor's request affects the whole run if the supervisor takes part in the run. Its secret must prove that
       one of its ranks was in a generation, or that its group was in a quorum of the job. Otherwise the supervisor
       affects only itself: a stop request stops it alone, and an exclusion request bars only its own name from the
       host. Before the first generation, any supervisor may stop the run.
    """

    def __init__(
        self,
        records: Iterable[Supervisor] = (),
        excluded: Iterable[ExcludedHost] = (),
        ending: Mapping[str, str] | None = None,
        kept_until: float = -math.inf,
    ) -> None:
        """Restore the supervisors and hosts that an earlier lighthouse stored.

        Args:
            records: Known supervisors.
            excluded: Excluded hosts.
            ending: Reason for the stop that each supervisor has received, by incarnation.
            kept_until: Time until which the names in `records` are reserved for these supervisors.
        """
        self._names = {each.entry.name: replace(each, is_awaited=True) for each in records}
        self._slots = sum(len(each.entry.slots) for each in self._names.values())
        self._kept_until = kept_until
        self._sessions: dict[int, Supervisor] = {}
        self._excluded = {(host.host, host.supervisor): host for host in excluded}
        self.ending = dict(ending or {})
        """Reason of the stop that each supervisor received, by incarnation."""

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(self._names.values())

    @property
    def is_empty(self) -> bool:
        """True if no supervisor has connected in this launch of the run."""
        return not self._names

    @property
    def are_connected(self) -> bool:
        return bool(self._sessions)

    @property
    def excluded_hosts(self) -> tuple[ExcludedHost, ...]:
        return tuple(self._excluded.values())

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Incarnations of all supervisors of this launch, including replaced and refused ones."""
        return tuple(one for each in self for one in (each.entry.incarnation, *each.former, *each.refused))

    def slots_of(self, replica_id: str) -> list[int]:
        """Return the slots that the group's supervisors have claimed, sorted."""
        own = (each.entry for each in self if replica_id in (each.entry.name, group_of_supervisor(each.entry.name)))
        return sorted(slot for entry in own for slot in entry.slots)

    def supervisor_records(self) -> tuple[Supervisor, ...]:
        return tuple(replace(each, session=None, last=SupervisorHeartbeat()) for each in self)

    # -- arrivals and losses

    def check_supervisor(self, entry: SupervisorHello, now: float) -> LighthouseError | None:
        """Return the error for a supervisor that may not enter the run, or None if it may.

        The supervisor may retry after DuplicateReplica, because the previous owner of its name may have died unnoticed.
        """
        known = self._names.get(entry.name)
        if known is not None and self._is_name_reserved(known, entry, now):
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
        """Return whether the caller uses the incarnation of a known supervisor, but not that supervisor's secret."""
        known = self._names.get(entry.name)
        is_named = known is not None and known.entry.incarnation == entry.incarnation
        return known is not None and is_named and bool(known.secret) and not is_shown(entry.secret, known.secret)

    def record_refused(self, entry: SupervisorHello) -> bool:
        """Record a refused supervisor as part of this launch.

        Return False if its name is unknown or its incarnation is already recorded.
        """
        known = self._names.get(entry.name)
        if known is None or entry.incarnation in (known.entry.incarnation, *known.former, *known.refused):
            return False
        known.refused = (*known.refused, entry.incarnation)[-FORMER_KEPT:]
        return True

    def _is_name_reserved(self, known: Supervisor, entry: SupervisorHello, now: float) -> bool:
        """Return whether the name or incarnation of `entry` is reserved for the supervisor `known`."""
        if not known.secret or is_shown(entry.secret, known.secret):
            return False
        is_there = known.session is not None or (known.is_awaited and now < self._kept_until)
        return is_there or entry.incarnation == known.entry.incarnation

    def extend_reservation(self, by_s: float) -> None:
        """Extend the reservation of names by the `by_s` seconds for which the lighthouse was paused."""
        self._kept_until += by_s

    def admit_supervisor(
        self, entry: SupervisorHello, session: int, *, has_part: bool = False
    ) -> tuple[int, LighthouseError] | None:
        """Admit a supervisor with the stream `session`. `has_part` is True if the generation contains a rank of it.

        Returns:
            The number of an older open stream of this name and the error with which the caller must close it, or None.
        """
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
            return older, Superseded(f"supervisor {entry.name} has opened another stream; this one is closed")
        return older, _superseded(before, entry)

    def mark_participating(self, secrets: Collection[str]) -> None:
        """Mark supervisors as taking part if they have one of `secrets`, the digests of a generation's ranks."""
        for each in self:
            each.has_part = each.has_part or each.secret in secrets

    def supervisor_of_session(self, session: int) -> Supervisor | None:
        """Return the supervisor of a stream, or None if it was refused or has opened another stream."""
        return self._sessions.get(session)

    def receive_heartbeat(self, session: int, heartbeat: SupervisorHeartbeat) -> None:
        if (known := self._sessions.get(session)) is not None:
            known.last = heartbeat

    @property
    def budget_used(self) -> float:
        """Largest share of its restart budget that any connected supervisor has used, from 0 to 1."""
        return max((known.last.budget_used for known in self._sessions.values()), default=0.0)

    def end_stream(self, session: int) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            known.session = None

    # -- stops

    @property
    def connected_incarnations(self) -> set[str]:
        return {known.entry.incarnation for known in self._sessions.values()}

    def record_stop(self, reason: str, incarnations: Iterable[str]) -> bool:
        """Record a stop for the supervisors with these incarnations. Return whether it is the first for any of them."""
        new = [each for each in sorted(incarnations) if each not in self.ending]
        self.ending |= dict.fromkeys(new, reason)
        for oldest in list(self.ending)[:-MAX_SUPERVISORS]:
            del self.ending[oldest]
        return bool(new)

    def find_name(self, incarnation: str) -> str:
        """Return the name of the supervisor that has or had the incarnation, or "" if there is none."""
        names = (each.entry.name for each in self if incarnation in (each.entry.incarnation, *each.former))
        return next(names, "")

    def supervisor_secret(self, name: str) -> str:
        """Return the digest of the secret of the supervisor `name`, or "" if it is unknown or has no secret."""
        known = self._names.get(name)
        return known.secret if known is not None else ""

    # -- hosts

    def exclude_host(self, host: str, reason: str, at: float, supervisor: str = "") -> bool:
        """Exclude a host for all supervisors, or only for `supervisor` if given. Return False if nothing changes.

        `at` is the wall-clock time of the exclusion, for display.
        """
        if (host, supervisor) in self._excluded or len(self._excluded) >= MAX_EXCLUDED:
            return False
        self._excluded[host, supervisor] = ExcludedHost(host, reason, at, supervisor)
        return True

    def why_excluded(self, host: str, supervisor: str) -> WrongState | None:
        """Return the error for an excluded host, or None if the host is not excluded.

        Args:
            host: Host of the supervisor or rank.
            supervisor: Name of the supervisor, or "" if there is none.
        """
        excluded = self._excluded.get((host, "")) or self._excluded.get((host, supervisor))
        if excluded is None:
            return None
        whom = f" for {excluded.supervisor}" if excluded.supervisor else ""
        return WrongState(
            f"host: {host} is excluded from this run{whom}: {excluded.reason}; "
            "repair it, then re-admit it with `lighthouse resume`"
        )

    def readmit_hosts(self) -> bool:
        """Readmit all hosts. Return whether any was excluded."""
        had, self._excluded = bool(self._excluded), {}
        return had


def _superseded(older: SupervisorHello, newer: SupervisorHello) -> Superseded:
    return Superseded(
        f"supervisor {older.name} on {older.host or 'an unnamed host'} has a successor of that name on "
        f"{newer.host or 'an unnamed host'}; end this one, or give each its own --replica-id"
    )


class RunMachine:
    """Pure state machine of one run. `now` is the caller's monotonic time in seconds."""

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
        """Create the machine, or restore it.

        Args:
            config: Settings, or None for the defaults.
            record: State that an earlier lighthouse stored, or None.
            keys: Stored keys.
            now: Current time.
            make_id: Returns an unused incident id for a wall-clock time.
            began_at: When this lighthouse began to serve runs, or None for `now`. The reservation of names starts then.
                The machine may be created later, because a run without processes has none.
        """
        record = record or RunRecord()
        kept_until = (now if began_at is None else began_at) + NAMES_KEPT_S
        self.config = config or RunConfig()
        self.stop = record.stop
        self.completed = record.completed
        self._effects: list[events.RunEffect] = []
        self.generations = Generations(self.config, record, now, self._effects, make_id)
        self.supervisors = Supervisors(record.supervisors, record.excluded, record.ending, kept_until)
        self.former = record.former
        self.keys = KeySpaces(self.generations.current.number, keys)
        if self._is_over:
            self.generations.end_run()

    # -- queries

    @property
    def is_quiet(self) -> bool:
        """True if no process is connected. The record then contains all state worth keeping."""
        return self.generations.ranks.has_no_live_rank and not self.supervisors.are_connected

    @property
    def _is_over(self) -> bool:
        return self.stop is not None or self.completed is not None

    def active_slots(self, name: str, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the slots of those `ranks` that are active in the current generation.

        Args:
            name: Name of a replica group or of this run. If the group has its own run, its ranks are the slots. If
                it shares the run with other groups, its supervisor has assigned the slots.
            ranks: Ranks in the group, or slots of the run.
        """
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

    def make_record(self, now: float) -> RunRecord:
        generations = self.generations
        return RunRecord(
            counters=generations.restarts.counters,
            terms=generations.terms,
            generation=generations.current.generation,
            is_broken=generations.current.is_broken,
            formed=generations.restarts.formed,
            stop=self.stop,
            ranks=generations.ranks.rank_records(self.config.wall_offset_s),
            restarts=generations.restarts.restarts,
            finished=tuple(sorted(generations.current.finished)),
            completed=self.completed,
            supervisors=self.supervisors.supervisor_records(),
            excluded=self.supervisors.excluded_hosts,
            former=self.former,
            ending=dict(self.supervisors.ending),
            failed_at=generations.budget.failed_at,
        )

    # -- events and time

    def handle(self, event: events.RunEvent, now: float) -> Sequence[events.RunEffect]:
        if isinstance(event, events.ProcessPaused):  # before `lose_lapsed_ranks`, so that the pause lapses no rank
            self.generations.postpone_timers(event.by_s, now)
            self.supervisors.extend_reservation(event.by_s)
        self.generations.lose_lapsed_ranks(now)
        self._dispatch(event, now)
        is_beat = isinstance(event, events.RankReported) and isinstance(event.message, RankHeartbeat)
        return self._finish_event(
            now, settles=bool(self._effects) or not is_beat or self.generations.is_decision_due(now)
        )

    def tick(self, now: float) -> Sequence[events.RunEffect]:
        self.generations.lose_lapsed_ranks(now)
        return self._finish_event(now)

    def deadline(self, now: float) -> float | None:
        """Return when to call `tick` next, or None if no timer is pending.

        Right after `handle` or `tick` with the same `now`, the result is later than `now`.
        """
        return self.generations.deadline(now)

    def _dispatch(self, event: events.RunEvent, now: float) -> None:
        match event:
            case events.RankJoined(entry, session):
                self._handle_rank_hello(entry, session, now)
            case events.RankReported(rank, message):
                if not self._send_end(rank):
                    self.generations.handle_rank_message(rank, message, now)
            case events.SessionEnded(session):
                self.generations.handle_stream_end(session, now)
            case events.RankLost():
                self._handle_rank_exit(event, now)
            case events.RanksBehind(slots, reason):
                self.generations.fail_ranks_behind(slots, reason, now)
            case events.SupervisorJoined(entry, session):
                self._handle_supervisor_hello(entry, session, now)
            case events.SupervisorEnded(session):
                self.supervisors.end_stream(session)
            case events.StopAsked(reason, who):
                self._stop_for_all(reason, who)
            case events.SupervisorAsked():
                self._receive_from_supervisor(event, now)
            case events.ResumeAsked():
                self._resume_run()
            case events.ProcessPaused():
                pass

    def _finish_event(self, now: float, *, settles: bool = True) -> Sequence[events.RunEffect]:
        why = self.generations.form_if_ready(now) if settles else ""
        for effect in self._effects:
            match effect:
                case events.GenerationFormed(generation):
                    self.keys.begin_space(generation.number)
                    self.supervisors.mark_participating(self._secrets_of(generation))
                case events.Completed(number, is_new=True):
                    self.completed = number
                case _:
                    pass
        if why:
            self._stop_for_all(why, "")
        effects = self._effects.copy()
        self._effects.clear()
        if any(isinstance(e, events.GenerationFormed | events.Resumed) or getattr(e, "is_new", False) for e in effects):
            return [events.RecordDue(self.make_record(now)), *effects]
        return effects

    # -- ranks

    def _handle_rank_hello(self, entry: RankHello, session: int | None, now: float) -> None:
        if self.former is not None and self._is_from_previous_launch(self.former, entry):
            self._effects.append(events.Completed(self.former.number, (entry.rank,)))
        else:
            if self._may_begin_launch and entry.is_first and not self._is_in_launch(entry.rank):
                self._begin_launch()
            name = self.supervisors.find_name(entry.rank.supervisor)
            error = self.supervisors.why_excluded(entry.host, name) or self._check_slot(entry.rank, name)
            if error is not None and not self._is_over:
                self._effects.append(events.RankRefused(entry.rank, error))
            elif not self._send_end(entry.rank):
                self.generations.handle_rank_hello(entry, session, now)
        self._record_stop_sent(_supervisors((entry.rank,)))

    def _check_slot(self, rank: RankId, name: str) -> WrongState | None:
        """Return an error if a supervisor other than `name` has a connected rank in the slot, otherwise None."""
        old = self.generations.ranks.rank_of_slot(rank.slot)
        if old is None or old.session is None:
            return None
        theirs = self.supervisors.find_name(old.rank.supervisor)
        if theirs == name or not theirs or not name:
            return None
        return WrongState(
            f"slot: {rank.slot} of this run is a rank of {theirs}, and also of {name}; if each group "
            f'restarts by itself use Wrapper(restart_scope="group"), if all ranks restart together give {name} its '
            "own --slot-offset"
        )

    def _send_end(self, rank: RankId) -> bool:
        """Notify the rank if the run is stopped or completed, and return whether it is."""
        if self.stop is not None:
            self._effects.append(events.Stopped(self.stop, (rank,)))
        elif self.completed is not None:
            self._effects.append(events.Completed(self.completed, (rank,)))
        return self._is_over

    def _handle_rank_exit(self, event: events.RankLost, now: float) -> None:
        """Handle a supervisor's report of a dead process.

        If the process is still a live rank with a secret, ignore the report unless it comes from its own supervisor.
        """
        if (rank := self.generations.ranks.find_live(event.rank)) is not None:
            if rank.secret and rank.secret != self.supervisors.supervisor_secret(event.by):
                return
            self.generations.lose_rank(rank, event.reason, now)
        if not self._is_over:  # rule 2
            generations = self.generations
            generations.restarts.add_exit(
                ProcessLost(event.rank, event.reason, event.output),
                event.by,
                generations.current.number,
                generations.wall_time(now),
                is_rank=generations.ranks.is_newest(event.rank),
            )

    @property
    def _may_begin_launch(self) -> bool:
        is_free = not self.generations.ranks.are_connected and not self.supervisors.are_connected
        return self.completed is not None and self.stop is None and is_free

    @property
    def _incarnations(self) -> tuple[str, ...]:
        """Incarnations of all supervisors of the launch, including those known only from their ranks."""
        of_ranks = (rank.rank.supervisor for rank in self.generations.ranks)
        return tuple(dict.fromkeys((*self.supervisors.incarnations, *of_ranks)))

    def _is_in_launch(self, rank: RankId) -> bool:
        """Return whether the rank's process or its supervisor belongs to the current launch."""
        return rank.supervisor in self._incarnations or self.generations.ranks.is_newest(rank)

    @staticmethod
    def _is_from_previous_launch(former: PreviousLaunch, entry: RankHello) -> bool:
        """Return whether the process belongs to `former`, the previous launch of the run."""
        numbers = [number for number in (entry.seen, entry.generation) if number is not None]
        return entry.rank.supervisor in former.incarnations or any(number <= former.number for number in numbers)

    def _begin_launch(self) -> None:
        assert self.completed is not None
        self.former = PreviousLaunch(self.completed, self._incarnations)
        self.supervisors = Supervisors(excluded=self.supervisors.excluded_hosts)
        self.generations.begin_launch()
        self.keys = KeySpaces()
        self.completed = None

    # -- stop

    def _stop_for_all(self, reason: str, who: str) -> None:
        """Stop the run, and record the supervisors that receive the stop. Do nothing if the run is over.

        `who` names the supervisor or operator that requested the stop. It is empty if the lighthouse stops the run.
        """
        if self._is_over:
            return
        of_ranks = _supervisors(rank.rank for rank in self.generations.ranks.live_ranks if rank.session is not None)
        self.supervisors.record_stop(reason, of_ranks | self.supervisors.connected_incarnations)
        self.stop = RunStopped(reason, who, self.generations.current.number)
        self.generations.current.is_broken = True
        self.generations.end_run()
        self._effects.append(events.Stopped(self.stop, self.generations.live_rank_ids, is_new=True))

    def _record_stop_sent(self, supervisors: set[str]) -> None:
        """If the run is stopped, record that the supervisors with these incarnations receive the stop."""
        if self.stop is not None and self.supervisors.record_stop(self.stop.reason, supervisors):
            self._effects.append(events.RecordChanged())

    def _resume_run(self) -> None:
        had_excluded = self.supervisors.readmit_hosts()
        if self.stop is None and not had_excluded:
            return
        if self.stop is not None:
            self.stop = None
            self.generations.resume_forming()
        self._effects.append(events.Resumed())

    def _handle_supervisor_hello(self, entry: SupervisorHello, session: int, now: float) -> None:
        if self._may_begin_launch and entry.incarnation not in self._incarnations:
            self._begin_launch()
        if (answer := self._why_not_admitted(entry, now)) is not None:
            self._effects.append(events.SupervisorMessage(session, answer))
            self._record_stop_sent({entry.incarnation})
            is_of_this_launch = isinstance(answer, HelloRejected) or self.completed is not None
            if is_of_this_launch and self.supervisors.record_refused(entry):
                self._effects.append(events.RecordChanged())
            return
        generation = self.generations.current.generation
        has_part = generation is not None and digest_of(entry.secret) in self._secrets_of(generation)
        replaced = self.supervisors.admit_supervisor(entry, session, has_part=has_part)
        if replaced is not None:
            self._effects.append(events.SupervisorMessage(replaced[0], HelloRejected(replaced[1])))
        self._effects.append(events.SupervisorMessage(session, SupervisorWelcome(self.config.beat_interval_s)))
        self._effects.append(events.RecordChanged())

    def _why_not_admitted(self, entry: SupervisorHello, now: float) -> ToSupervisor | None:
        if self.stop is not None:
            return self.stop
        if self.completed is not None:
            return RunCompleted(self.completed)
        if self.former is not None and entry.incarnation in self.former.incarnations:
            return RunCompleted(self.former.number)
        reason = self.supervisors.ending.get(entry.incarnation)
        if reason is not None and not self.supervisors.is_impostor(entry):
            return RunStopped(reason, "the run, which was resumed since", self.generations.current.number)
        error = self.supervisors.check_supervisor(entry, now)
        return None if error is None else HelloRejected(error)

    def can_stop_run(self, session: int, membership: Membership) -> bool:
        """Return whether a stop request on this supervisor's stream affects the whole run (`Supervisors`, rule 4).

        `membership` states whether the supervisor's group is in the job's quorum.
        """
        is_open = membership is Membership.OPEN and self.generations.current.generation is None
        return is_open or self._has_part(session, membership)

    def _has_part(self, session: int, membership: Membership) -> bool:
        known = self.supervisors.supervisor_of_session(session)
        return known is not None and (known.has_part or membership is Membership.MEMBER)

    def _secrets_of(self, generation: Generation) -> set[str]:
        """Return the digests of the secrets that the generation's ranks have."""
        found = (self.generations.ranks.rank_of_slot(rank.slot) for rank in generation.active)
        return {rank.secret for rank in found if rank is not None and rank.secret and rank.rank in generation.active}

    def _receive_from_supervisor(self, event: events.SupervisorAsked, now: float) -> None:
        known = self.supervisors.supervisor_of_session(event.session)
        if known is None or self._is_over:
            return
        match event.message:
            case StopAsked(reason):
                if known.entry.incarnation in self.supervisors.ending:
                    return
                if self.can_stop_run(event.session, event.membership):
                    self._stop_for_all(reason, known.entry.name)
                else:
                    self._stop_outsider(event.session, known.entry, reason)
            case HostExcluded(reason):
                self._exclude_host(known.entry, reason, now, is_for_all=self._has_part(event.session, event.membership))

    def _stop_outsider(self, session: int, entry: SupervisorHello, reason: str) -> None:
        self.supervisors.record_stop(reason, {entry.incarnation})
        self._effects.append(events.OutsiderIgnored(entry.name, "its stop affects only itself"))
        stop = RunStopped(reason, entry.name, self.generations.current.number)
        self._effects.append(events.SupervisorMessage(session, stop))
        self._effects.append(events.RecordChanged())

    def _exclude_host(self, entry: SupervisorHello, reason: str, now: float, *, is_for_all: bool) -> None:
        host, whom = entry.host or entry.name, "" if is_for_all else entry.name
        if not self.supervisors.exclude_host(host, reason, self.generations.wall_time(now), whom):
            return
        if whom:
            self._effects.append(events.OutsiderIgnored(whom, f"host {host} is excluded for this supervisor only"))
        for rank in [rank for rank in self.generations.ranks.live_ranks if rank.host == host]:
            if is_for_all or self.supervisors.find_name(rank.rank.supervisor) == whom:
                self.generations.lose_rank(rank, f"its host {host} is excluded: {reason}", now)
        self._effects.append(events.RecordChanged())


def _supervisors(ranks: Iterable[RankId]) -> set[str]:
    """Return the incarnations of the ranks' supervisors."""
    return {rank.supervisor for rank in ranks if rank.is_supervised}
