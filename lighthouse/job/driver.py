"""Driver of one job: feeds events to the `QuorumMachine`, performs the returned effects and sets the machine's timer.

The driver is synchronous. It reaches the clock, sessions, pending calls and the store through ports, so the simulator
runs the same code. Effects are performed in order. A record is stored before any message that depends on it is sent.
`WaitingJoins` holds the calls that are waiting for a quorum, and `SessionTable` the managers' open sessions.
`WorldBroadcast` sends managers the job's world size whenever it changes.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lighthouse.job import events
from lighthouse.job.forming import Decision, QuorumMachine, peers_pending
from lighthouse.job.incident_driver import IncidentDriver, IncidentRegistry, JobAccount, ProgressDriver
from lighthouse.job.log import VerdictLog, log_cut, log_end, log_journal_outdated, log_order, log_quorum
from lighthouse.job.presence import staying_groups
from lighthouse.job.progress import Grid, Levels, Pace, Samples, grid_of, levels_of
from lighthouse.job.records import Group, QuorumRecord
from lighthouse.job.run_driver import FROM_TIMER, MachineDriver, Ports, RunDriver
from lighthouse.job.status import TimelineWriter, explain, job_status, preemption_status
from lighthouse.job.store import MemoryStore, RecordStore
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.limits import answer_margin_s
from lighthouse_protocol.messages.chaos import FaultCancelled, FaultOrder, FaultReport
from lighthouse_protocol.messages.membership import MAX_PENDING_NAMED, Participant, Quorum, QuorumChange, World
from lighthouse_protocol.messages.preemption import PreemptionNoted, PreemptionNotice, PreemptionReport
from lighthouse_protocol.messages.session import (
    Evidence,
    EvidenceDone,
    Goodbye,
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    Leave,
    QuorumChanged,
    ToLighthouse,
    ToManager,
    WithdrawRequest,
)
from lighthouse_protocol.messages.status import JobStatus, TimelineKind
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_protocol.rules.quorum_change import NamedQuorum, change_between
from lighthouse_protocol.rules.stall import StallVerdict
from lighthouse_runtime.histogram import Histogram
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Peer, Reply, Timer, Timers
from lighthouse_runtime.timing.timers import DeadlineTimer, DelayedAlert

log = logging.getLogger(__name__)


class QuorumDelivery:
    """A quorum to send to managers. A manager that has the previous quorum receives only the changes."""

    def __init__(self, quorum: Quorum, before: "QuorumDelivery | None" = None) -> None:
        self._quorum = quorum
        self._before = before
        if before is not None:
            before._before = None  # otherwise each quorum would keep all earlier ones in memory

    def change_for(self, held: str) -> QuorumChange | None:
        """Return the changes since the quorum with digest `held`, or None if the whole quorum must be sent."""
        if not held or self._before is None or held != self._before._named.digest:
            return None
        return self._change

    @cached_property
    def _named(self) -> NamedQuorum:
        return NamedQuorum.of(self._quorum)

    @cached_property
    def _change(self) -> QuorumChange | None:
        return change_between(self._before._quorum, self._named) if self._before is not None else None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a group's join: the quorum that has formed, and whether it serves several steps without new joins."""

    quorum: Quorum
    stands: bool
    secret: str = field(default="", repr=False)  # known to the quorum's members with sessions
    delivery: QuorumDelivery | None = field(default=None, repr=False)  # None if the whole quorum must be sent


@dataclass(frozen=True, slots=True)
class SessionReply:
    """Sends a manager the answer to the join that the manager numbered `join`: a quorum or an error."""

    peer: Peer[ToManager]
    join: int
    holds: str = field(default="", compare=False)  # digest of the quorum that the manager holds

    def answer(self, value: Answer) -> None:
        change = value.delivery.change_for(self.holds) if value.delivery is not None else None
        if change is None:
            self.peer.send(JoinAccepted(self.join, value.quorum, value.stands, value.secret))
        else:
            self.peer.send(QuorumChanged(self.join, change, value.stands, value.secret))

    def refuse(self, error: LighthouseError) -> None:
        self.peer.send(JoinRejected(self.join, error))


@dataclass(frozen=True, slots=True)
class _Waiting:
    replica_id: str
    reply: Reply[Answer]
    limit: Timer
    began_at: float


class WaitingJoins:
    """Pending joins: requests of groups for the next quorum, received on sessions or as separate calls."""

    def __init__(self, ports: Ports, waits: Histogram) -> None:
        """Create an empty queue. `waits` records how many seconds each answered join waited."""
        self._clock = ports.timers.time
        self._refused = ports.refused
        self._waits = waits
        self._calls: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add_call(self, call: int, replica_id: str, reply: Reply[Answer], limit: Timer) -> None:
        self._calls[call] = _Waiting(replica_id, reply, limit, self._clock())

    def drop_call(self, call: int | None) -> str | None:
        """Drop the join with number `call` without an answer. Return its group's replica_id, or None if not pending."""
        waiting = self._take_call(call)
        return None if waiting is None else waiting.replica_id

    def answer_calls(self, calls: Sequence[int], answer: Answer) -> None:
        for call in calls:
            if (waiting := self._take_call(call)) is not None:
                self._waits.add(self._clock() - waiting.began_at)
                waiting.reply.answer(answer)

    def refuse_call(self, call: int, error: LighthouseError) -> None:
        if (waiting := self._take_call(call)) is not None:
            self._refused(error)
            waiting.reply.refuse(error)

    def refuse_all_calls(self, error: LighthouseError) -> None:
        for call in list(self._calls):
            self.refuse_call(call, error)

    def _take_call(self, call: int | None) -> _Waiting | None:
        waiting = self._calls.pop(call, None) if call is not None else None
        if waiting is not None:
            waiting.limit.cancel()
        return waiting


@dataclass(slots=True)
class Session:
    """A manager's open session, with the newest join that it has carried."""

    peer: Peer[ToManager]
    replica_id: str
    join: int | None = None  # call number of its newest join
    reply: SessionReply | None = None  # receives the answer to that join


class SessionTable(dict[int, Session]):
    """Open sessions of managers, by session number."""

    def send_to_session(self, number: int, message: ToManager) -> None:
        if (session := self.get(number)) is not None:
            session.peer.send(message)

    def end_session_stream(self, number: int, error: LighthouseError | None, reason: str = "") -> None:
        if (session := self.get(number)) is None:
            return
        if error is None:
            session.peer.send(Goodbye(reason))
        session.peer.end(error)


SEND_AFTER_S = 0.1  # a burst of changes is sent once
SENT_AT_ONCE = 50  # sessions per timer call, so that other work does not wait
SESSIONS_RENEWED_PER_S = 5000  # with more sessions, the world is computed less often
# A short wait is normal and not logged, because the ranks of a group connect one after another.
HELD_BACK_LOGGED_AFTER_S = 10.0


class WorldBroadcast:
    """Sends managers the job's `World` message (its size and pending joins), and logs which groups lack ranks.

    Each session receives the message soon after it opens and whenever the content changes. Sending to all sessions
    takes a while. A session that is still in the queue when the content changes receives only the newest message.
    """

    def __init__(self, job: str, machine: QuorumMachine, sessions: SessionTable, timers: Timers) -> None:
        self._job = job
        self._machine = machine
        self._sessions = sessions
        self._behind: dict[int, None] = {}  # sessions without the newest world, in sending order
        self._has_grid_changed = False
        self._has_changed = False
        self._clock = timers.time
        self._renew_at = 0.0
        self._grid = Grid(())
        self._world: World | None = None
        self._waiting_for = ""
        self._held_back = DelayedAlert(timers, self._log_held_back, HELD_BACK_LOGGED_AFTER_S)
        self._timer = DeadlineTimer(self._send_next, timers)

    def add_receiver(self, number: int) -> None:
        """Queue the current `World` message for the new session `number`."""
        self._behind[number] = None

    def set_waiting_for(self, waiting_for: str) -> None:
        """Set the description of what pending joins are waiting for. It is "" if no join is pending."""
        if waiting_for != self._waiting_for:
            self._waiting_for = waiting_for
            self.schedule_send()

    def note_effects(self, effects: Sequence[events.QuorumEffect]) -> None:
        """Schedule an update if any of the machine's effects may change the `World` message."""
        for effect in effects:
            self._has_grid_changed |= isinstance(effect, events.GridChanged)
            self._has_changed |= isinstance(effect, events.GridChanged | events.NewcomersChanged | events.QuorumFormed)
        self.schedule_send()

    def schedule_send(self) -> None:
        """Set the timer for the next send, unless it is set already or there is nothing to send."""
        if not self._timer.is_set and (self._behind or self._is_new):
            self._timer.set_after(SEND_AFTER_S)

    @property
    def _is_new(self) -> bool:
        """True if the last computed `World` message may be outdated."""
        sent = self._world.waiting_for if self._world is not None else ""
        return self._has_changed or self._waiting_for != sent

    def close(self) -> None:
        self._held_back.close()
        self._timer.cancel()

    def _send_next(self) -> None:
        if self._world is None or (self._is_new and self._clock() >= self._renew_at):
            self._recompute_world()
        for number in list(itertools.islice(self._behind, SENT_AT_ONCE)):
            del self._behind[number]
            assert self._world is not None
            self._sessions.send_to_session(number, self._world)
        self.schedule_send()

    def _recompute_world(self) -> None:
        """Recompute the `World` message. If the message has changed, queue it for all sessions."""
        self._renew_at = self._clock() + len(self._sessions) / SESSIONS_RENEWED_PER_S
        has_grid_changed, self._has_grid_changed, self._has_changed = self._has_grid_changed, False, False
        if has_grid_changed:
            self._grid = grid_of(self._machine.job.groups.values())
            self._held_back.set(self._grid.describe_incomplete())
        world = world_of(self._machine, self._grid, self._waiting_for)
        if world.pending and (self._world is None or world.pending != self._world.pending):
            fields = event("groups_join", job=self._job, groups=world.peers_pending)
            log.info("waiting to join: %s", world.joining_names, extra=fields)
        if world != self._world:
            self._behind |= dict.fromkeys(self._sessions)  # waiting sessions keep their place
        self._world = world

    def _log_held_back(self, groups: str) -> None:
        """Log `groups`, which describes the incomplete groups. If `groups` is empty, log that all are complete."""
        if not groups:
            log.info("all replica groups are complete", extra=event("groups_complete", job=self._job))
            return
        fields = event("groups_incomplete", job=self._job)
        log.warning("%s; a replica group joins only when all its ranks are connected", groups, extra=fields)


def world_of(machine: QuorumMachine, grid: Grid, waiting_for: str = "") -> World:
    """Compute the `World` message that all groups receive. Leave out `group_world_size`, which differs by group."""
    pending = peers_pending(machine.job)
    return World(
        global_world_size=grid.global_world_size,
        largest_peer_group_world_size=grid.largest_peer_group_world_size,
        ranks_pending=grid.ranks_pending,
        peers_pending=pending,
        pending=tuple(machine.joins.list_newcomers()[: min(pending, MAX_PENDING_NAMED)]),
        waiting_for=waiting_for,
    )


class JobDriver(MachineDriver[events.QuorumEvent, events.QuorumEffect]):
    """Drives the `QuorumMachine` of one job. Holds the job's sessions, pending joins, progress and incidents."""

    def __init__(
        self,
        job: str,
        machine: QuorumMachine,
        ports: Ports,
        incident_registry: IncidentRegistry | None = None,
        store: RecordStore | None = None,
        runs: Callable[[], Sequence[RunDriver]] = tuple,
        secret: str = "",
    ) -> None:
        """Create the driver of `machine`, which may contain restored state.

        `runs` returns the job's runs. `secret` is the secret of the restored quorum, or "" if there is none.
        """
        super().__init__(machine, ports)
        self.job = job
        self.machine = machine
        self.account = JobAccount(machine.job.groups)
        self._samples = Samples()
        self._faults: dict[int, tuple[str, Reply[FaultReport]]] = {}  # group and caller of each ordered fault
        self._opening = 0  # session whose hello the machine is handling
        self._has_notices = False  # True if a group may have a preemption notice
        self._secret = secret
        self._runs = runs
        self._store = store or MemoryStore()
        self._wall = ports.wall
        self._sessions = SessionTable()
        self._timeline = TimelineWriter(machine.job)
        self._incident_registry = incident_registry or IncidentRegistry()
        self.progress = ProgressDriver(job, machine.job.groups, ports, self)
        self.incidents = IncidentDriver(job, machine.job, ports, self._incident_registry, self, self.progress)
        self._worlds = WorldBroadcast(job, machine, self._sessions, ports.timers)
        self._waiting = WaitingJoins(ports, self.account.waits)
        self._verdicts = VerdictLog(job, machine, ports.timers, self._worlds.set_waiting_for)
        self._delivery: QuorumDelivery | None = None  # newest quorum that this lighthouse formed
        self._decision: Decision | None = None  # newest decision that was processed
        now = self._clock()
        self._perform(machine.tick(now), now)  # a wait of the restored state may be over, or have a deadline

    # -- calls

    def request_quorum(self, participant: Participant, time_left_s: float, reply: Reply[Answer]) -> int:
        """Request the next quorum for a replica group, and return the number of the call.

        `reply` receives the quorum or an error before `time_left_s` seconds have passed.
        """
        call = next(self._numbers)
        self._add_request(events.Joined(call, participant, self._clock() + time_left_s), time_left_s, reply)
        return call

    def cancel_request(self, call: int) -> None:
        """Cancel a request for a quorum. Do nothing if it has been answered."""
        if (replica_id := self._waiting.drop_call(call)) is not None:
            self._feed(events.Withdrawn(replica_id, call))

    def _add_request(self, joined: events.Joined, time_left_s: float, reply: Reply[Answer]) -> None:
        give_up_in_s = time_left_s - answer_margin_s(time_left_s)
        limit = self._ports.timers.call_later(give_up_in_s, self._expire_request, joined, time_left_s)
        self._waiting.add_call(joined.call, joined.participant.replica_id, reply, limit)
        self._feed(joined)

    def _expire_request(self, joined: events.Joined, time_left_s: float) -> None:
        reason = f"{self.machine.decision.verdict}: {explain(self.machine, self._clock())}"
        self._waiting.refuse_call(joined.call, DeadlinePassed(f"no quorum within {time_left_s:.3g} s: {reason}"))
        with FROM_TIMER:
            self._feed(events.Withdrawn(joined.participant.replica_id, joined.call))

    def receive_heartbeat_call(self, replica_id: str, incarnation: str) -> None:
        self._feed(events.HeartbeatReceived(replica_id, incarnation))

    def open_session(self, hello: Hello, peer: Peer[ToManager]) -> int:
        """Open a session for a manager and return the session's number."""
        number = next(self._numbers)
        self._sessions[number] = Session(peer, hello.participant.replica_id)
        self._worlds.add_receiver(number)
        self._opening = number
        self._feed(events.SessionOpened(number, hello))
        if self._opening:  # the machine has not refused the session
            self._take_notice(hello.participant.replica_id, None)  # a manager repeats a notice that is still valid
            self._add_report(hello.participant.replica_id, hello.levels)
        self._opening = 0
        return number

    def receive_from_manager(self, number: int, message: ToLighthouse) -> None:
        session = self._sessions.get(number)
        if session is None:
            return
        match message:
            case Heartbeat():
                self._feed(events.SessionHeartbeatReceived(number, message))
                self._timeline.check_heal(session.replica_id, self._wall())
                self._add_report(session.replica_id, message.levels)
                if message.progress is not None:
                    self.progress.add_view(session.replica_id, message.progress)
                    self.incidents.handle_view(session.replica_id, message.progress)
            case JoinRequest(join, participant, time_left_s, holds):
                older, replica_id = session.join, self._waiting.drop_call(session.join)  # replaced by the newer join
                session.join, session.reply = next(self._numbers), SessionReply(session.peer, join, holds)
                joined = events.Joined(session.join, participant, self._clock() + time_left_s, number)
                self._add_request(joined, time_left_s, session.reply)
                if older is not None and replica_id is not None:
                    self._feed(events.Withdrawn(replica_id, older))  # never answered, even if the newer is refused
            case WithdrawRequest(join):
                if session.join is not None and session.reply == SessionReply(session.peer, join):
                    self.cancel_request(session.join)
            case Leave():
                self._feed(events.Left(number))
            case PreemptionReport(notice):
                self._take_notice(session.replica_id, notice)
            case Evidence() | EvidenceDone():
                if isinstance(message, EvidenceDone) and message.progress is not None:
                    self.progress.add_view(session.replica_id, message.progress)
                self.incidents.receive_evidence(number, message)
            case Hello():
                self._sessions.end_session_stream(number, None, "a session has one hello")
            case FaultReport(fault):
                replica_id, reply = self._faults.get(fault, ("", None))
                if reply is not None and replica_id == session.replica_id:
                    reply.answer(message)

    def _add_report(self, replica_id: str, report: GroupReport) -> None:
        now, group = self._clock(), self.machine.job.groups.get(replica_id)
        new = self.account.add_report(replica_id, report, now)
        self._incident_registry.ledger.add_report(self.job, group, report, new, now)

    def end_session(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._waiting.drop_call(session.join)
            self._feed(events.SessionEnded(number))

    def send_to_member(self, member: Group, message: ToManager) -> bool:
        """Send a message on the member's session. Return False if the member has no open session."""
        if member.session is None or not member.is_connected:
            return False
        self._sessions.send_to_session(member.session, message)
        return True

    def _take_notice(self, replica_id: str, notice: PreemptionNotice | None) -> None:
        """Store a group's preemption notice and announce it if it is new, or remove it if `notice` is None."""
        group = self.machine.job.groups.get(replica_id)
        if group is None or (notice is None and group.reports.preemption is None):
            return
        reports, is_new = group.reports, notice != group.reports.preemption
        reports.preemption, reports.others_stay = notice, None
        if notice is not None and is_new:
            left_s, now = notice.left_s(self._wall()), self._clock()
            reports.preempted_at = None if left_s is None else now + left_s
            text = str(preemption_status(group, now))
            self.add_timeline_entry(TimelineKind.NOTICE, (replica_id,), text)
            log.info("%s %s", replica_id, text, extra=event("preempted", job=self.job, replica_id=replica_id))
            if notice != reports.announced:
                reports.announced = notice
                self._ports.preempted(self.job, replica_id, notice)
        self._answer_notices()

    def _answer_notices(self) -> None:
        """Send each group that has a preemption notice the number of other groups that will remain.

        Each group receives the number once, and again whenever it changes to or from zero.
        """
        groups = self.machine.job.groups.values()
        noticed = [group for group in groups if group.reports.preemption is not None]
        self._has_notices = bool(noticed)
        staying = staying_groups(groups)
        for group in noticed:
            others = len(staying) - (group.replica_id in staying)
            is_news = group.reports.others_stay is not (others > 0)
            if is_news and self.send_to_member(group, PreemptionNoted(others)):
                group.reports.others_stay = others > 0

    def order_fault(self, member: Group, order: FaultOrder, reply: Reply[FaultReport]) -> bool:
        """Order a member to inject a fault for `lighthouse chaos`. `reply` receives the report of the member's manager.

        Return False if the member has no open session. Even then, the caller must call `cancel_fault` at the end.
        """
        self._faults[order.number] = member.replica_id, reply
        return self.send_to_member(member, order)

    def cancel_fault(self, number: int) -> None:
        replica_id, _ = self._faults.pop(number)
        if (member := self.machine.job.groups.get(replica_id)) is not None:
            self.send_to_member(member, FaultCancelled(number))

    def record_kill(self, member: Group, why: str) -> None:
        """Record that an operator killed a group. Do nothing if the group is not in the current quorum."""
        quorum = self.machine.quorum
        if quorum is not None and member.is_participant:
            self.incidents.handle_kill(member.replica_id, quorum.quorum_id, why)

    def handle_run_message(self) -> None:
        """Update progress and incidents after a rank of one of the job's runs has sent a message."""
        self.progress.watch.wake()
        self.incidents.handle_run_progress()

    # -- queries

    def status(self, *, has_ranks: bool = False) -> JobStatus:
        """Return the job's status. If `has_ranks`, include the progress of every rank and the timeline."""
        verdict, now = self.progress.verdict(), self._clock()
        incidents = self._incident_registry.newest_summaries(self.job)
        ranks = self.progress.ranks() if has_ranks else ()
        timeline = self._timeline.entries if has_ranks else ()
        rate, progress = self._samples.steps_per_s(self._levels(), now), self.progress
        status = job_status(
            self.job, self.machine, now, verdict, ranks, timeline, incidents, progress.heals, progress.known.data, rate
        )
        return replace(status, discards=self.account.all_discards)

    def take_sample(self) -> None:
        """Take a sample of the job's speed and size for `current_pace`. Call this every EVERY_S seconds."""
        self._samples.add_levels(self._levels(), self._clock())

    def current_pace(self) -> Pace:
        """Return how fast the job is training now, and how fast it trained during the last few minutes."""
        return self._samples.pace_of(self._levels(), self.account.all_discards, self._clock())

    def _levels(self) -> Levels:
        ranks = () if self.machine.job.groups else self.progress.ranks()
        return levels_of(self.machine.job, ranks, self.account.goodput(self._clock()))

    def add_timeline_entry(self, kind: TimelineKind, replica_ids: Sequence[str], text: str) -> None:
        self._timeline.add_entry(self._wall(), kind, replica_ids, text)

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        """Handle a new stall verdict, or the end of a stall (None)."""
        self._timeline.add_verdict(verdict, self._wall())
        self.incidents.handle_verdict(verdict)

    def list_runs(self) -> Sequence[RunDriver]:
        return self._runs()

    def find_run(self, run_id: str) -> RunDriver | None:
        """Return the job's run with this id, or None if no such run has live ranks."""
        return next((run for run in self.list_runs() if run.run_id == run_id and run.has_ranks), None)

    def find_member(self, wire_id: str) -> Group | None:
        groups = self.machine.job.groups
        return groups.get(wire_id) or groups.get(split_replica_id(wire_id)[0])

    @property
    def should_remember_end(self) -> bool:
        return self.machine.should_remember_end(self._clock())

    @property
    def is_quiet(self) -> bool:
        has_ranks = any(run.has_ranks for run in self.list_runs())
        return self.machine.is_quiet(self._clock()) and not self._waiting and not self._sessions and not has_ranks

    def handle_pause(self, by_s: float) -> None:
        self.progress.handle_pause(by_s)
        self.incidents.handle_pause(by_s)
        super().handle_pause(by_s)

    def close(self, reason: str) -> None:
        """Refuse all pending calls and close all sessions, without counting any member as lost."""
        self._is_closed = True
        self._timer.cancel()
        self.progress.close()
        self.incidents.close(reason)
        self._worlds.close()
        self._verdicts.close()
        self._waiting.refuse_all_calls(Unreachable(reason))
        for session in list(self._sessions):
            self._sessions.end_session_stream(session, None, reason)

    # -- feed and perform

    def _feed(self, event: events.QuorumEvent) -> None:
        super()._feed(event)
        match event:
            case _ if self._is_closed:
                pass
            case events.SessionEnded(session):
                self.incidents.end_session_rounds(session)
            case events.Joined(_, participant):
                self.incidents.handle_participant(participant)
            case events.SessionHeartbeatReceived(_, beat) if beat.levels.held is not None:
                self.incidents.handle_grant(beat.levels.held)
            case _:
                pass

    def _now(self) -> float:
        """Return the current time.

        If the machine is due to decide which disconnected members are lost, but this host is busy, send it `HostBusy`,
        which may postpone the decision.
        """
        now = self._clock()
        if self.machine.presence.silence.is_judging(now) and self._ports.is_busy():
            self._perform(self.machine.handle(events.HostBusy(), now), now)
        return now

    def _perform(self, effects: Sequence[events.QuorumEffect], now: float) -> None:
        for effect in effects:
            self._perform_one(effect)
        if self.machine.decision is self._decision:  # the machine has only acknowledged a heartbeat
            return
        self._decision = self.machine.decision
        news = [effect for effect in effects if not isinstance(effect, events.HeartbeatAnswered)]
        if news:
            self._timeline.add_effects(news, self._wall())
        ledger, groups = self._incident_registry.ledger, self.machine.job.groups
        for effect in news:
            match effect:
                case events.MemberJoined(replica_id) | events.MemberReturned(replica_id):
                    ledger.observe_group(self.job, groups.get(replica_id), now)
                case events.MemberLost(replica_id, _, _, last_seen_at):
                    self.incidents.handle_loss(effect)
                    self.incidents.end_slow_group(replica_id)
                    ledger.observe_group(self.job, groups.get(replica_id), now, last_seen_at)
                case events.MemberLeft(replica_id):
                    self.incidents.end_slow_group(replica_id)
                    ledger.end_group(self.job, replica_id, now)
                    if (group := groups.get(replica_id)) is not None:
                        self.account.stop_time(group.reports, now)
                case events.MemberForgotten(reports):
                    self.account.stop_time(reports, now)
                    self.progress.known.drop_view(reports)
                case events.QuorumFormed(quorum):
                    self.incidents.handle_quorum(quorum, is_new=effect.is_new)
                    ledger.add_quorum(self.job, max(member.step for member in quorum.participants))
                    for group in groups.values():
                        ledger.observe_group(self.job, group, now)
                case events.JobEnded(step) if self.machine.quorum is not None:
                    self.incidents.handle_job_end(step, self.machine.quorum.quorum_id)
                    ledger.end_job(self.job, now)
                case _:
                    pass
        changes = events.MemberLost | events.MemberLeft | events.MemberDraining | events.QuorumFormed
        if self._has_notices and any(isinstance(effect, changes) for effect in news):
            self._answer_notices()
        self._verdicts.update_verdict()
        self._worlds.note_effects(news)
        if not self._is_closed:
            self._timer.set(self.machine.deadline(now))

    def _perform_one(self, effect: events.QuorumEffect) -> None:
        match effect:
            case events.QuorumFormed(quorum, calls, is_new, stands, record, is_branch):
                if is_new:
                    self._secret = self._ports.draw_secret()
                if record is not None:
                    self._commit(record)
                # Log the quorum before any group can log it, as `check-history` requires.
                log_quorum(self.job, quorum, is_new=is_new, is_branch=is_branch)
                self._delivery = QuorumDelivery(quorum, self._delivery)
                self._waiting.answer_calls(calls, Answer(quorum, stands, self._secret, self._delivery))
            case events.QuorumResent(quorum, call, stands):
                self._waiting.answer_calls([call], Answer(quorum, stands, self._secret))
            case events.JobEnded(_, _, record):
                self._commit(record)
                log_end(self.job, effect)
            case events.JoinRefused(call, error):
                self._waiting.refuse_call(call, error)
            case events.HeartbeatAnswered(session, number, order):
                self._sessions.send_to_session(
                    session, HeartbeatAck(number, self.machine.presence.beat_interval_s, order)
                )
            case events.Welcomed(session, welcome):
                self._sessions.send_to_session(session, welcome)
            case events.Ordered(order, sessions):
                for session in sessions:
                    self._sessions.send_to_session(session, order)
                log_order(self.job, order)
            case events.JournalOutdated():
                log_journal_outdated(self.job, effect)
            case events.ConnectionsCut():
                log_cut(self.job, effect)
            case events.SessionRefused(session, error, reason):
                if session == self._opening and error is not None:
                    self._opening = 0
                    self._ports.refused(error)
                if (ended := self._sessions.get(session)) is not None:
                    self._waiting.drop_call(ended.join)
                self._sessions.end_session_stream(session, error, reason)
            case (
                events.MemberJoined()
                | events.MemberReturned()
                | events.MemberLost()
                | events.MemberLeft()
                | events.MemberForgotten()
                | events.MemberDraining()
            ):
                pass  # read by the timeline and the incidents
            case events.GridChanged() | events.NewcomersChanged():
                pass  # read by the world broadcast

    def _commit(self, record: QuorumRecord) -> None:
        with self._ports.guarded():
            self._store.commit(self.job, replace(record, secret=self._secret))
