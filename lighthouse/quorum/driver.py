"""The loop's side of one job's machine: feed an event, perform the effects in order, re-arm one timer."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lighthouse.incidents.driver import IncidentDriver
from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.members.rules.events import (
    GridChanged,
    MemberBack,
    MemberDraining,
    MemberJoined,
    MemberLeft,
    MemberLost,
)
from lighthouse.members.rules.roster import Member
from lighthouse.progress.driver import ProgressDriver
from lighthouse.quorum.log import log_journal_outdated, log_order, log_quorum
from lighthouse.quorum.rules.events import (
    Effect,
    Event,
    HeartbeatAnswered,
    HeartbeatReceived,
    Joined,
    JoinRefused,
    JournalOutdated,
    Left,
    NewcomersChanged,
    Ordered,
    QuorumFormed,
    QuorumResent,
    SessionEnded,
    SessionHeartbeatReceived,
    SessionOpened,
    SessionRefused,
    WasLate,
    Welcomed,
    Withdrawn,
)
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.quorum.rules.status import awaited, explain, job_status
from lighthouse.quorum.rules.timeline import History
from lighthouse.quorum.rules.verdict import Verdict
from lighthouse.quorum.sessions import SessionTable
from lighthouse.quorum.waiting_joins import Answer, WaitingJoins
from lighthouse.quorum.world_broadcast import WorldBroadcast
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.limits import answer_margin_s
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import (
    Evidence,
    EvidenceDone,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinRequest,
    Leave,
    ToLighthouse,
    ToManager,
    WithdrawRequest,
)
from lighthouse_protocol.messages.status import JobStatus, TimelineKind
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_protocol.rules.stall import FLOOR_S, StallVerdict
from lighthouse_runtime.server.streams import Sender
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer

log = logging.getLogger(__name__)

# A round takes milliseconds: only a wait that lasts is worth a line.
LOG_WAIT_AFTER_S = 1.0


class JobDriver:
    """`remember` writes a record down before it returns; `lateness` says by how much the loop itself was late."""

    def __init__(
        self,
        job: str,
        machine: QuorumMachine,
        remember: Callable[[QuorumRecord], None] = lambda record: None,
        check_lateness: Callable[[], None] = lambda: None,
        stall_after_s: float = FLOOR_S,
        desk: IncidentRegistry | None = None,
    ) -> None:
        self.job = job
        self.machine = machine
        self._remember = remember
        self._check_lateness = check_lateness
        self._clock = asyncio.get_running_loop().time
        self._timer = DeadlineTimer(self._tick, asyncio.get_running_loop())
        self._numbers = itertools.count(1)
        self._sessions = SessionTable()
        self._names: dict[int, str] = {}  # the replica groups of the sessions
        self._history = History(machine.roster)
        self._desk = desk or IncidentRegistry()
        self.incidents = IncidentDriver(
            job, machine.roster, self._desk, self.tell, self.note, lambda: len(machine.joins) > 0
        )
        self._places = ProgressDriver(job, machine.roster, stall_after_s, self._stalled)
        self._worlds = WorldBroadcast(job, machine, self._sessions)
        self._waiting = WaitingJoins(self._sessions)
        self._logged: Verdict | None = None
        self._log_timer: asyncio.TimerHandle | None = None

    # -- calls

    async def join(self, participant: Participant, time_left_s: float) -> Answer:
        """The next quorum with `participant` in it. Raises a refusal, at the latest when the time is over."""
        call, now = next(self._numbers), self._clock()
        answer = self._waiting.wait(call)
        self._feed(Joined(call, participant, now + time_left_s))
        try:
            async with asyncio.timeout(time_left_s - answer_margin_s(time_left_s)):
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():  # it came in the same moment
                return answer.result()
            raise self._too_late(time_left_s) from None
        finally:
            if self._waiting.drop(call):
                self._feed(Withdrawn(call))

    def beat(self, replica_id: str, incarnation: str) -> None:
        self._feed(HeartbeatReceived(replica_id, incarnation))

    # -- sessions

    def open_session(self, hello: Hello, sender: Sender) -> int:
        """The number of the session."""
        session = next(self._numbers)
        self._sessions.add(session, sender)
        self._names[session] = hello.participant.replica_id
        self._worlds.opened(session)
        self._feed(SessionOpened(session, hello))
        return session

    def receive(self, session: int, message: ToLighthouse) -> None:
        match message:
            case Heartbeat():
                self._feed(SessionHeartbeatReceived(session, message))
                if (name := self._names.get(session)) is not None:
                    self._history.beat(name, time.time())
                    if message.progress is not None:
                        self._places.take(name, message.progress)
            case JoinRequest(number, participant, time_left_s):
                self._join_by_session(session, number, participant, time_left_s)
            case WithdrawRequest(number):
                if (call := self._waiting.drop_session(session, number)) is not None:
                    self._feed(Withdrawn(call))
            case Leave():
                self._feed(Left(session))
            case Evidence() | EvidenceDone():
                self.incidents.received(session, message)
            case Hello():
                self._sessions.end(session, None, "a session has one hello")

    def _join_by_session(self, session: int, number: int, participant: Participant, time_left_s: float) -> None:
        call = next(self._numbers)
        give_up_in_s = time_left_s - answer_margin_s(time_left_s)
        limit = asyncio.get_running_loop().call_later(give_up_in_s, self._give_up, call, time_left_s)
        self._waiting.add_join(call, session, number, limit)
        self._feed(Joined(call, participant, self._clock() + time_left_s, session))

    def _give_up(self, call: int, time_left_s: float) -> None:
        self._waiting.refuse(call, self._too_late(time_left_s))
        self._feed(Withdrawn(call))

    def _too_late(self, time_left_s: float) -> DeadlinePassed:
        reason = f"{self.machine.verdict()}: {explain(self.machine, self._clock())}"
        return DeadlinePassed(f"no quorum within {time_left_s:.3g} s: {reason}")

    def end_session(self, session: int) -> None:
        self._sessions.remove(session)
        self._worlds.ended(session)
        self._names.pop(session, None)
        self._waiting.drop_session(session)
        self._feed(SessionEnded(session))

    def tell(self, member: Member, message: ToManager) -> bool:
        """Whether `member` has a session to be told by."""
        if member.session is None or not member.is_connected:
            return False
        self._sessions.send(member.session, message)
        return True

    def killed(self, member: Member, why: str) -> None:
        """By a person."""
        quorum = self.machine.quorum
        if quorum is not None and self.machine.is_participant(member):
            self.incidents.killed(member.replica_id, quorum.quorum_id, why)

    # -- what it is

    def status(self, *, has_ranks: bool = False) -> JobStatus:
        """`has_ranks`: with the place of every rank, and the timeline."""
        verdict, now, incidents = self._places.verdict(), self._clock(), self._desk.newest(self.job)
        if not has_ranks:
            return job_status(self.job, self.machine, now, verdict, incidents=incidents)
        timeline = self._history.timeline.entries
        return job_status(self.job, self.machine, now, verdict, self._places.ranks(), timeline, incidents)

    def note(self, kind: TimelineKind, replica_ids: Sequence[str], text: str) -> None:
        """It goes to the timeline."""
        self._history.timeline.note(time.time(), kind, replica_ids, text)

    def _stalled(self, verdict: StallVerdict | None) -> None:
        self._history.stall(verdict, time.time())
        self.incidents.said(verdict)

    @property
    def phase_seconds(self) -> dict[str, float]:
        return self._places.seconds

    def member(self, wire_id: str) -> Member | None:
        return self.machine.roster.get(wire_id) or self.machine.roster.get(split_replica_id(wire_id)[0])

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def is_quiet(self) -> bool:
        return self.machine.is_quiet(self._clock()) and not self._waiting and not self._sessions

    def was_late(self, by_s: float) -> None:
        """The whole process was held up; feed that before anything that has waited meanwhile."""
        now = self._clock()
        self._perform(self.machine.handle(WasLate(by_s), now), now)

    def close(self, reason: str) -> None:
        self._timer.cancel()
        self._places.close()
        self.incidents.close(reason)
        self._worlds.close()
        self._stop_watching()
        self._waiting.refuse_all(Unreachable(reason))
        for session in list(self._sessions):
            self._sessions.end(session, None, reason)

    # -- feed and perform

    def _feed(self, event: Event) -> None:
        self._check_lateness()
        now = self._clock()
        self._perform(self.machine.handle(event, now), now)
        self._tell_incidents(event)

    def _tell_incidents(self, event: Event) -> None:
        match event:
            case SessionEnded(session):
                self.incidents.session_ended(session)
            case Joined(_, participant):
                self.incidents.joined(participant)
            case SessionHeartbeatReceived(_, beat) if beat.levels.held is not None:
                self.incidents.held(beat.levels.held)
            case _:
                pass

    def _tick(self) -> None:
        self._check_lateness()
        now = self._clock()
        with suppress(LighthouseError):  # the journal cannot be written: that is logged, and ends the daemon (jobs.py)
            self._perform(self.machine.tick(now), now)

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            self._perform_one(effect)
        self._history.read(effects, time.time())
        for effect in effects:
            match effect:
                case MemberLost():
                    self.incidents.lost(effect)
                case QuorumFormed():
                    self.incidents.formed(effect.quorum, is_new=effect.is_new)
                case _:
                    pass
        self._watch_verdict()
        self._worlds.read(effects)
        self._timer.set(self.machine.deadline(now))

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case QuorumFormed(quorum, calls, is_new, stands, record):
                if record is not None:
                    self._remember(record)
                self._waiting.answer(calls, Answer(quorum, stands))
                log_quorum(self.job, quorum, is_new=is_new)
            case QuorumResent(quorum, call):
                self._waiting.answer([call], Answer(quorum, stands=True))
            case JoinRefused(call, error):
                self._waiting.refuse(call, error)
            case HeartbeatAnswered(session, number, order):
                self._sessions.send(session, HeartbeatAck(number, self.machine.attendance.beat_interval_s, order))
            case Welcomed(session, welcome):
                self._sessions.send(session, welcome)
            case Ordered(order, sessions):
                self._sessions.order(order, sessions)
                log_order(self.job, order)
            case JournalOutdated():
                log_journal_outdated(self.job, effect)
            case SessionRefused(session, error, reason):
                self._end(session, error, reason)
            case MemberJoined() | MemberBack() | MemberLost() | MemberLeft() | MemberDraining():
                pass  # read by the timeline and the incidents
            case GridChanged() | NewcomersChanged():
                pass  # read by the world broadcast

    def _end(self, session: int, error: LighthouseError | None, reason: str) -> None:
        self._waiting.drop_session(session)
        self._sessions.end(session, error, reason)

    # -- log

    def _watch_verdict(self) -> None:
        """Log why there is no quorum once that has lasted, and again when the reason changes."""
        if self.machine.verdict() in (Verdict.FORMED, Verdict.NOBODY_ASKS):
            self._logged = None
            self._stop_watching()
            self._worlds.wait("")
        elif self._log_timer is None:
            self._log_timer = asyncio.get_running_loop().call_later(LOG_WAIT_AFTER_S, self._log_verdict)

    def _log_verdict(self) -> None:
        self._log_timer = None
        verdict = self.machine.verdict()
        if verdict is not self._logged:
            self._logged = verdict
            log.info("[%s] no quorum: %s (%s)", self.job, verdict, explain(self.machine, self._clock()))
        self._worlds.wait(awaited(self.machine))
        self._watch_verdict()

    def _stop_watching(self) -> None:
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None
