"""Driver of one run: feeds events to the `RunMachine`, performs the returned effects and sets the machine's timer.

The driver is synchronous. It reaches the clock, streams and the store through ports, so the simulator runs the same
code. Effects are performed in order. A record is stored before any message that depends on it is sent. Changes on which
no message depends are stored a little later, as notes. `RankStreams` holds the streams of ranks, and `RunEvidence`
collects the evidence for an incident that ranks report about themselves.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from lighthouse.job import events
from lighthouse.job.events import ProcessPaused
from lighthouse.job.incidents import incident_of
from lighthouse.job.log import log_effect
from lighthouse.job.progress import RankQuota, RunRank
from lighthouse.job.records import Membership, Rank, RunName, RunRecord
from lighthouse.job.restarts import RunMachine
from lighthouse.job.slow_ranks import SLOW_AFTER_S
from lighthouse.job.status import run_ranks, run_status
from lighthouse.job.store import RecordStore
from lighthouse_protocol.identity import group_of_supervisor
from lighthouse_protocol.messages import run
from lighthouse_protocol.messages.incident import EvidenceAsked, Incident, RankEvidence, SelfReport, fit_evidence
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.messages.session import Evidence, EvidenceDone, EvidenceRequest
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotPermitted,
    Superseded,
    Unreachable,
)
from lighthouse_protocol.rules.access import digest_of
from lighthouse_protocol.rules.rate_limits import TokenBucket
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.ports import Peer, Timer, Timers
from lighthouse_runtime.process.logs import without_credentials
from lighthouse_runtime.timing.timers import DeadlineTimer

W = TypeVar("W")
M = TypeVar("M")
Event = TypeVar("Event")
Effect = TypeVar("Effect")
Handled = TypeVar("Handled", contravariant=True)
Returned = TypeVar("Returned", covariant=True)

# Timers have no caller that could handle an unwritable journal. registry.py logs the error and shuts down.
FROM_TIMER = suppress(LighthouseError)


@dataclass(frozen=True, slots=True)
class Ports:
    """Functions and settings of this process that the drivers of all jobs and runs share."""

    timers: Timers
    wall: Callable[[], float]
    """Returns the time in seconds since the epoch."""
    check_lag: Callable[[], None] = lambda: None
    """Calls `handle_pause` on each driver if the process was paused."""
    guarded: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager for each write to the store."""
    refused: Callable[[LighthouseError], None] = lambda error: None
    """Receives the error of each refused join or hello."""
    draw_secret: Callable[[], str] = str
    """Returns a random secret for a new quorum. Only the quorum's members receive it."""
    preempted: Callable[[str, str, PreemptionNotice], None] = lambda job, replica_id, notice: None
    """Receives each new notice that a group's hosts will be taken away."""
    is_busy: Callable[[], bool] = lambda: False
    """Checks whether this host is overloaded."""
    stall_after_s: float = FLOOR_S
    """Shortest time without progress that counts as a stall."""
    slow_after_s: float = SLOW_AFTER_S
    """Seconds for which a rank must be slower than its peers before it counts as slow."""
    ranks_kept: RankQuota = field(default_factory=RankQuota)

    def check_lag_in_timer(self) -> None:
        with FROM_TIMER:
            self.check_lag()


class Machine(Protocol[Handled, Returned]):
    def handle(self, event: Handled, now: float) -> Sequence[Returned]: ...

    def tick(self, now: float) -> Sequence[Returned]: ...

    def deadline(self, now: float) -> float | None: ...


class MachineDriver(Generic[Event, Effect]):
    """Feeds events to a state machine, performs the returned effects in order and sets the machine's timer."""

    def __init__(self, machine: Machine[Event | ProcessPaused, Effect], ports: Ports) -> None:
        self._machine = machine
        self._ports = ports
        self._clock = ports.timers.time
        self._timer = DeadlineTimer(self._tick, ports.timers)
        self._numbers = itertools.count(1)
        self._is_closed = False

    def handle_pause(self, by_s: float) -> None:
        """Postpone the machine's timeouts, because the whole process was paused for `by_s` seconds.

        Call this before any event that arrived during the pause.
        """
        now = self._clock()
        self._perform(self._machine.handle(ProcessPaused(by_s), now), now)

    def _feed(self, event: Event) -> None:
        if not self._is_closed:
            self._ports.check_lag()
            now = self._now()
            self._perform(self._machine.handle(event, now), now)

    def _tick(self) -> None:
        with FROM_TIMER:
            self._ports.check_lag()
            now = self._now()
            self._perform(self._machine.tick(now), now)

    def _now(self) -> float:
        return self._clock()

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            self._perform_one(effect)
        if not self._is_closed:
            self._timer.set(self._machine.deadline(now))

    def _perform_one(self, effect: Effect) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Stream(Generic[W, M]):
    owner: W
    peer: Peer[M]


class Streams(dict[int, Stream[W, M]]):
    """Open streams of a run by session number, each with its rank or with its supervisor's hello."""

    def owner_of(self, session: int) -> W | None:
        """Return the rank, or the supervisor's hello, of an open stream. Return None if the stream is not open."""
        stream = self.get(session)
        return None if stream is None else stream.owner

    def send_on(self, session: int, message: M) -> None:
        if (stream := self.get(session)) is not None:
            stream.peer.send(message)

    def send_on_all(self, message: M) -> None:
        for stream in self.values():
            stream.peer.send(message)

    def refuse_stream(self, session: int, refusal: M) -> None:
        """Send a refusal as the last message and close the stream."""
        if (stream := self.pop(session, None)) is not None:
            stream.peer.send(refusal)
            stream.peer.end()

    def close_all(self, error: LighthouseError) -> None:
        for stream in self.values():
            stream.peer.end(error)


class RankStreams:
    """Streams of ranks. A newer stream of the same process replaces the older one."""

    def __init__(self) -> None:
        self.open = Streams[run.RankId, run.ToRunRank]()
        self._newest: dict[run.RankId, int] = {}

    def add_stream(self, session: int, rank: run.RankId, peer: Peer[run.ToRunRank]) -> None:
        older = self.open.pop(self._newest.get(rank, 0), None)
        if older is not None:
            older.peer.end(Superseded(f"{rank} has opened another stream; this one is closed"))
        self.open[session] = Stream(rank, peer)
        self._newest[rank] = session

    def send_to_ranks(self, ranks: Sequence[run.RankId], message: run.ToRunRank) -> None:
        for rank in ranks:
            self.open.send_on(self._newest.get(rank, 0), message)

    def refuse_rank(self, rank: run.RankId, refusal: run.ToRunRank) -> None:
        self.open.refuse_stream(self._newest.pop(rank, 0), refusal)

    def remove_stream(self, session: int) -> None:
        stream = self.open.pop(session, None)
        if stream is not None and self._newest.get(stream.owner) == session:
            del self._newest[stream.owner]


ANSWERED_WITHIN_S = 3.0
SILENT = (
    f"all evidence: no answer within {ANSWERED_WITHIN_S:g} s; "
    "it is stopped, or something prevents it from running Python"
)
OUTSIDE = "process and output: only managers report them, for ranks with an Agent"

Deliver = Callable[[Evidence | EvidenceDone], None]


@dataclass(slots=True)
class _Round:
    """A pending request for evidence, with the ranks that have not answered yet."""

    number: int
    deliver: Deliver
    began_at: float
    size: int
    waiting: dict[run.RankId, RankEvidence]  # known facts about each rank that has not answered
    limit: Timer


class RunEvidence:
    """Collects evidence from the ranks of a run, and delivers it in the same messages that a manager uses."""

    def __init__(self, timers: Timers, ask: Callable[[Iterable[run.RankId], EvidenceAsked], None]) -> None:
        self._timers = timers
        self._ask = ask
        self._numbers = itertools.count(1)
        self._rounds: dict[int, _Round] = {}

    def ask_ranks(self, request: EvidenceRequest, ranks: Iterable[Rank], deliver: Deliver) -> None:
        waiting = {
            rank.rank: RankEvidence(rank.rank.slot, rank.rank.incarnation, rank.pid, rank.host)
            for rank in ranks
            if not request.group_ranks or rank.rank.slot in request.group_ranks
        }
        number, now = next(self._numbers), self._timers.time()
        limit = self._timers.call_later(ANSWERED_WITHIN_S, self._end_round, number)
        self._rounds[number] = _Round(request.number, deliver, now, len(waiting), waiting, limit)
        self._ask(waiting, EvidenceAsked(number))

    def add_answer(self, rank: run.RankId, own: SelfReport) -> None:
        round_ = self._rounds.get(own.number)
        known = None if round_ is None else round_.waiting.pop(rank, None)
        if round_ is None or known is None:
            return
        took_s = self._timers.time() - round_.began_at
        evidence = replace(
            known,
            stacks=own.stacks,
            flight_recorder=own.flight_recorder,
            missing=(*own.missing, OUTSIDE),
            took_s=took_s,
        )
        round_.deliver(Evidence(round_.number, fit_evidence(evidence, round_.size)))
        if not round_.waiting:
            self._end_round(own.number)

    def end_all_rounds(self) -> None:
        for number in list(self._rounds):
            self._end_round(number)

    def _end_round(self, number: int) -> None:
        round_ = self._rounds.pop(number)
        round_.limit.cancel()
        for known in round_.waiting.values():
            round_.deliver(Evidence(round_.number, replace(known, missing=(SILENT,))))
        round_.deliver(EvidenceDone(round_.number))


NOTED_WITHIN_S = 0.2
NOTES_SHARE = 0.05  # maximum share of the event loop's time for notes
# A durable write blocks the loop for a millisecond or more. All ranks may write at once when a generation begins.
KEY_WRITES_PER_S = 100.0
KEY_WRITES_AT_ONCE = 1000


class RunOwner(Protocol):
    """The methods of `JobRegistry` that `RunDriver` calls."""

    def record_run_incident(self, incident: Incident) -> None: ...

    def handle_run_message(self, job: str) -> None:
        """Update the job after a rank of one of its runs has sent a message other than its hello."""
        ...

    def membership(self, job: str, replica_id: str, digest: str) -> Membership:
        """Return the group's membership in its job's quorum, which it proves with a secret that has this `digest`."""
        ...

    def report_exit(self, job: str, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        """Report the exit of a group's process. Return whether the exit may explain the loss of the group."""
        ...


class RunDriver(MachineDriver[events.RunEvent, events.RunEffect]):
    """Drives the `RunMachine` of one run. Holds the run's streams, and collects evidence from its ranks."""

    def __init__(
        self,
        name: RunName,
        machine: RunMachine,
        store: RecordStore,
        ports: Ports,
        owner: RunOwner,
    ) -> None:
        """Create the driver of a run. `store` holds the run's record and keys, and `owner` is the job registry."""
        super().__init__(machine, ports)
        self.name = name
        self.machine = machine
        self._store = store
        self._owner = owner
        self._note_timer = DeadlineTimer(self._write_due_notes, ports.timers)
        self._noted_after_s = NOTED_WITHIN_S
        self._key_writes = TokenBucket(KEY_WRITES_PER_S, KEY_WRITES_AT_ONCE)
        self._ranks = RankStreams()
        self._evidence = RunEvidence(ports.timers, lambda ranks, asked: self._ranks.send_to_ranks(tuple(ranks), asked))
        self._supervisors = Streams[run.SupervisorHello, run.ToSupervisor]()

    # -- ranks

    def open_rank(self, entry: run.RankHello, peer: Peer[run.ToRunRank]) -> int:
        """Open a rank's stream and return the stream's number.

        Refuse a process if its slot belongs to a rank with another secret. The stream of that rank then stays open.
        """
        session, asked = next(self._numbers), entry.rank
        ranks = self.machine.generations.ranks
        entry = ranks.place_hello(entry)
        if (error := ranks.check_owner(entry, self._clock())) is not None:
            log_effect(self.name, events.RankRefused(entry.rank, error))
            peer.send(run.HelloRejected(error))
            peer.end()
            return session
        self._ranks.add_stream(session, entry.rank, peer)
        if entry.rank != asked:
            self._ranks.open.send_on(session, run.SlotGiven(entry.rank.slot))
        self._feed(events.RankJoined(entry, session))
        self._ranks.open.send_on(session, run.RankWelcome(self._store.term))
        return session

    def receive_from_rank(self, session: int, message: run.FromRunRank) -> None:
        rank = self._ranks.open.owner_of(session)
        if rank is None:
            return
        if isinstance(message, run.RankHello):
            raise InvalidRequest("a rank's stream has one", field="hello")
        if isinstance(message, SelfReport):
            self._evidence.add_answer(rank, message)
        else:
            self._feed(events.RankReported(rank, message))
            self._owner.handle_run_message(self.name[0])

    def end_rank(self, session: int) -> None:
        self._ranks.remove_stream(session)
        self._feed(events.SessionEnded(session))

    # -- supervisors

    def open_supervisor(self, entry: run.SupervisorHello, peer: Peer[run.ToSupervisor]) -> int:
        """Open a supervisor's stream and return the stream's number."""
        session = next(self._numbers)
        self._supervisors[session] = Stream(entry, peer)
        self._feed(events.SupervisorJoined(entry, session))
        return session

    def receive_from_supervisor(self, session: int, message: run.FromSupervisor) -> None:
        entry = self._supervisors.owner_of(session)
        if entry is None:
            return
        match message:
            case run.SupervisorHeartbeat():
                self.machine.supervisors.receive_heartbeat(session, message)
            case run.ProcessLost(rank, reason, output):
                output = tuple(map(without_credentials, output))  # stored in files and bug reports
                message = run.ProcessLost(rank, reason, output)
                if self.machine.generations.ranks.is_newest(rank) or not self._report_exit(entry, message):
                    self._feed(events.RankLost(rank, reason, output, entry.name))
            case run.StopAsked() | run.HostExcluded():
                self._feed(events.SupervisorAsked(session, message, self._membership(entry)))
            case run.SupervisorHello():
                raise InvalidRequest("a supervisor's stream has one", field="hello")

    def can_stop_run(self, session: int) -> bool:
        """Return whether a stop request on this supervisor's stream affects the whole run (rule 4 of `Supervisors`)."""
        entry = self._supervisors.owner_of(session)
        return entry is not None and self.machine.can_stop_run(session, self._membership(entry))

    def is_changed_by(self, entry: run.SupervisorHello, asked: run.StopAsked | run.HostExcluded) -> bool:
        """Return whether the supervisor's request would change anything for the run."""
        if self.is_over:
            return False
        if isinstance(asked, run.StopAsked):
            return True
        host = entry.host or entry.name
        return all(
            (excluded.host, excluded.supervisor) != (host, "") for excluded in self.machine.supervisors.excluded_hosts
        )

    def _report_exit(self, entry: run.SupervisorHello, lost: run.ProcessLost) -> bool:
        """Pass a supervisor's report of an exited process to the job.

        Return whether the exit may explain the loss of a replica group.
        """
        group, slot = group_of_supervisor(entry.name), lost.rank.slot
        slots = self.machine.supervisors.slots_of(group)
        group_rank = slots.index(slot) if slot in slots else slot
        evidence = RankEvidence(
            group_rank, lost.rank.incarnation, host=entry.host, process=f"ended: {lost.reason}", output=lost.output
        )
        return self._owner.report_exit(self.name[0], group, lost.reason, evidence)

    def _membership(self, entry: run.SupervisorHello) -> Membership:
        return self._owner.membership(self.name[0], group_of_supervisor(entry.name), digest_of(entry.secret))

    def end_supervisor(self, session: int) -> None:
        self._supervisors.pop(session, None)
        self._feed(events.SupervisorEnded(session))

    # -- places of ranks

    def ranks(self) -> tuple[RunRank, ...]:
        return run_ranks(self.machine, self._clock())

    @property
    def has_ranks(self) -> bool:
        return not self.machine.generations.ranks.has_no_live_rank

    @property
    def is_over(self) -> bool:
        return self.machine.stop is not None or self.machine.completed is not None

    @property
    def run_id(self) -> str:
        return self.name[1]

    @property
    def size(self) -> int:
        """Number of active ranks in the current generation."""
        return len(self.machine.generations.current.active)

    @property
    def steps(self) -> int:
        """Number of steps that ranks have reported. It grows when any rank completes a step."""
        return self.machine.generations.steps

    def collect_evidence(self, request: EvidenceRequest, deliver: Deliver) -> None:
        """Collect evidence from the requested ranks, or from all active ranks if the request names none.

        Pass each rank's evidence to `deliver`, and EvidenceDone at the end.
        """
        generations = self.machine.generations
        here = generations.ranks.live_ranks
        ranks = here if request.group_ranks else [rank for rank in here if rank.rank in generations.current.active]
        self._evidence.ask_ranks(request, ranks, deliver)

    # -- operators and keys

    def fail_ranks(self, name: str, ranks: Collection[int], reason: str) -> bool:
        """End the current generation because some ranks keep the others waiting.

        Args:
            name: Name of a replica group or of this run.
            ranks: Ranks in the group, or slots of the run.
            reason: Cause of the restart.

        Returns:
            True if any of these ranks is in the generation.
        """
        active = self.machine.active_slots(name, ranks)
        if active:
            self._feed(events.RanksBehind(active, reason))
        return bool(active)

    def request_stop(self, reason: str, who: str) -> None:
        self._feed(events.StopAsked(reason, who))

    def request_resume(self) -> None:
        self._feed(events.ResumeAsked())

    def put_key(self, generation: int, kind: run.KeyKind, name: str, value: bytes, *, slot: int, secret: str) -> None:
        """Set a key for the rank in `slot`, which must have the `secret`. The key is durable when this returns.

        Raises:
            NotPermitted: The caller is not a rank of the run.
            LighthouseError: The key or value is invalid, or a limit is reached.
        """
        if not self.machine.generations.ranks.is_of_slot(slot, secret):
            raise NotPermitted(
                f"slot: only ranks of run {self.run_id} set its keys, and this caller is not the rank of slot {slot}"
            )
        if not self._key_writes.try_take(self._clock()):
            raise LimitReached(
                f"keys written for one run: at most {KEY_WRITES_AT_ONCE:g} at once and {KEY_WRITES_PER_S:g} a second "
                "are taken; try again later"
            )
        row = self.machine.keys.put_row(generation, kind, name, value)
        with self._ports.guarded():
            self._store.commit_key(self.name, row)

    def status(self) -> run.RunStatus:
        return run_status(self.name, self.machine, self._clock())

    # -- life cycle

    @property
    def is_quiet(self) -> bool:
        return self.machine.is_quiet and not self._ranks.open and not self._supervisors

    def write_notes(self) -> None:
        """Store the pending changes of the run's record, if there are any."""
        if self._note_timer.is_set:
            self._note_timer.cancel()
            self._write_due_notes()

    def close(self, reason: str) -> None:
        """Close all streams, without counting any rank as lost."""
        self._is_closed = True
        self._evidence.end_all_rounds()
        self._timer.cancel()
        self._note_timer.cancel()
        self._ranks.open.close_all(Unreachable(reason))
        self._supervisors.close_all(Unreachable(reason))

    # -- effects

    def _perform_one(self, effect: events.RunEffect) -> None:
        match effect:
            case events.RecordDue(record):
                self._remember(record)
            case events.GenerationFormed(generation, spares):
                self._send_generation(generation, (*generation.active, *spares))
            case events.GenerationSent(rank, generation):
                self._send_generation(generation, (rank,))
            case events.Interrupted(number, reason, ranks, is_failure=is_failure):
                self._ranks.send_to_ranks(ranks, run.GenerationEnded(number, reason, is_failure))
            case events.RankRefused(rank, error):
                self._ranks.refuse_rank(rank, run.HelloRejected(error))
            case events.Completed(number, ranks, is_new):
                self._ranks.send_to_ranks(ranks, run.RunCompleted(number))
                if is_new:
                    self._supervisors.send_on_all(run.RunCompleted(number))
            case events.Stopped(stop, ranks, is_new):
                self._ranks.send_to_ranks(ranks, stop)
                if is_new:
                    self._supervisors.send_on_all(stop)
            case events.Resumed() | events.OutsiderIgnored():
                pass
            case events.SupervisorMessage(session, run.HelloRejected() as refusal):
                self._supervisors.refuse_stream(session, refusal)
            case events.SupervisorMessage(session, message):
                self._supervisors.send_on(session, message)
            case events.RecordChanged():
                self._note()
            case events.IncidentChanged(restart):
                self._owner.record_run_incident(incident_of(self.name, restart))
                self._note()
        log_effect(self.name, effect)

    def _send_generation(self, generation: run.Generation, ranks: Sequence[run.RankId]) -> None:
        slots = tuple(rank.slot for rank in generation.active)
        self._ranks.send_to_ranks(ranks, run.GenerationFormed(generation.counters, slots))

    def _remember(self, record: RunRecord) -> None:
        kept = self.machine.keys.generations
        with self._ports.guarded():
            self._store.commit_run(self.name, record, kept[0] if kept else 0)

    def _note(self) -> None:
        if not self._note_timer.is_set:
            self._note_timer.set_after(self._noted_after_s)

    def _write_due_notes(self) -> None:
        began_at = self._clock()
        with FROM_TIMER:
            self._remember(self.machine.make_record(began_at))
        self._noted_after_s = max(NOTED_WITHIN_S, (self._clock() - began_at) / NOTES_SHARE)
