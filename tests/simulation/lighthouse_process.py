"""The lighthouse: its machine, driven as in production, its journal, and the ends of its connections.

Effects are performed in their order, and it can die between any two of them. What is written comes before what is
told. A new life has what the journal kept, and waits for the holders of what an earlier one may have told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lighthouse.members.rules.events import MemberEffect
from lighthouse.quorum.rules.events import (
    Effect,
    Event,
    HeartbeatAnswered,
    HeartbeatReceived,
    Joined,
    JoinRefused,
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
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    Leave,
    ToLighthouse,
    WithdrawRequest,
)
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError
from tests.simulation.network import End
from tests.simulation.torchft_manager import UnaryAnswer, UnaryCancel, UnaryHeartbeat, UnaryQuorum
from tests.simulation.world import Died, Process, Timer

if TYPE_CHECKING:
    from tests.simulation.lighthouse_site import Lighthouse

HOST = "lighthouse"
PULSE_S = 0.25
KEEPALIVE_S = (1.0, 2.0)
ANSWER_MARGIN_S = 0.05


@dataclass(slots=True)
class _Call:
    """A join that waits. `session` None: by the documented call, which came over `end`."""

    session: int | None
    number: int
    end: End


class LighthouseProcess(Process):
    def __init__(self, site: "Lighthouse") -> None:
        super().__init__(site.world, f"lighthouse{site.starts}", HOST)
        self.site = site
        self.machine = self._make_machine()
        self.sessions: dict[int, End] = {}
        self.calls: dict[int, _Call] = {}
        self.crash_in: int | None = None
        self._armed: int | None = None
        self._numbers: dict[End, int] = {}
        self._patience: dict[End, float] = {}
        self._next_session = 0
        self._next_call = 0
        self._timer = Timer(self, self._tick)
        self._watches_silence = False
        self.on_death.append(self._die)
        self.say(f"starts with {site.journal.record and site.journal.record.quorum_id}")
        self._timer.set(self.machine.deadline(self.clock()))

    def _make_machine(self) -> QuorumMachine:
        record, now = self.site.journal.record, self.clock()
        config = replace(self.site.config, first_quorum_id=self.site.wall_ms())
        if record is None:
            return QuorumMachine(config, holders_until=now + config.lease_s)
        record = self.site.journal.record = replace(record, lease_s=max(record.lease_s, config.lease_s))
        return QuorumMachine(config, record=record, holders_until=now + record.lease_s)

    # -- connections

    def accept(self, end: End) -> None:
        end.on_message = lambda message: self._receive(end, message)
        end.on_end = lambda: self._ended(end)
        self._patience[end] = self.world.random.uniform(*KEEPALIVE_S)
        if not self._watches_silence:
            self._watches_silence = True
            self.after(PULSE_S, self._keep_alive)

    def _keep_alive(self) -> None:
        """The server's pings: a connection that does not answer them for a while is closed."""
        now = self.world.now
        for end in list(self._patience):
            if not end.peer.is_silent():
                end.silent_since = None
            elif end.silent_since is None:
                end.silent_since = now
            elif now - end.silent_since > self._patience[end]:
                self.say(f"keepalive ends the connection of {end.peer.process.name}")
                end.close()
                self._ended(end)
        self._watches_silence = bool(self._patience)
        if self._patience:
            self.after(PULSE_S, self._keep_alive)

    def _ended(self, end: End) -> None:
        self._patience.pop(end, None)
        session = self._numbers.pop(end, None)
        for number in [number for number, call in self.calls.items() if call.end is end]:
            if session is None:
                self._withdraw(number)
            else:
                del self.calls[number]
        if session is not None:
            self.sessions.pop(session, None)
            self.feed(SessionEnded(session))

    def _receive(self, end: End, message: Any) -> None:
        if isinstance(message, Hello):
            self._next_session += 1
            self._numbers[end] = self._next_session
            self.sessions[self._next_session] = end
            return self.feed(SessionOpened(self._next_session, message))
        session = self._numbers.get(end)
        if session is None:
            return self._receive_call(end, message)
        return self._receive_by(session, end, message)

    def _receive_by(self, session: int, end: End, message: ToLighthouse) -> None:
        match message:
            case Heartbeat():
                self.feed(SessionHeartbeatReceived(session, message))
            case JoinRequest(number, participant, time_left_s):
                call = self._new_call(_Call(session, number, end), time_left_s)
                self.feed(Joined(call, participant, self.clock() + time_left_s, session))
            case WithdrawRequest(number):
                self._cancel(end, number)
            case Leave():
                self.feed(Left(session))
            case Hello():
                pass

    def _receive_call(self, end: End, message: Any) -> None:
        match message:
            case UnaryHeartbeat(replica_id, incarnation):
                self.feed(HeartbeatReceived(replica_id, incarnation))
            case UnaryQuorum(number, participant, time_left_s):
                call = self._new_call(_Call(None, number, end), time_left_s)
                self.feed(Joined(call, participant, self.clock() + time_left_s))
            case UnaryCancel(number):
                self._cancel(end, number)
            case _:
                pass

    # -- calls

    def _new_call(self, call: _Call, time_left_s: float) -> int:
        self._next_call += 1
        self.calls[self._next_call] = call
        left_s = max(0.0, time_left_s - ANSWER_MARGIN_S) / self.rate
        self.after(left_s, self._time_over, self._next_call)
        return self._next_call

    def _time_over(self, number: int) -> None:
        call = self.calls.get(number)
        if call is not None:
            self._withdraw(number)
            self._refuse(call, DeadlinePassed("no quorum in time"))

    def _withdraw(self, number: int) -> None:
        del self.calls[number]
        self.feed(Withdrawn(number))

    def _cancel(self, end: End, number: int) -> None:
        for call, waiting in list(self.calls.items()):
            if waiting.end is end and waiting.number == number:
                self._withdraw(call)

    # -- the machine

    def feed(self, event: Event) -> None:
        now = self.clock()
        self._perform(self.machine.handle(event, now), now)

    def _tick(self) -> None:
        now = self.clock()
        self._perform(self.machine.tick(now), now)

    def pause(self, for_s: float) -> None:
        super().pause(for_s)
        self.after(for_s, self._wake, for_s)

    def _wake(self, for_s: float) -> None:
        """It notices by a pulse that came late."""
        for end in self._patience:
            end.silent_since = None
        late_s = for_s * self.rate - self.world.random.uniform(0, PULSE_S)
        if late_s > PULSE_S:
            self.feed(WasLate(late_s))

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, MemberEffect | NewcomersChanged):
                continue  # nothing is sent for it
            self._may_die()
            match effect:
                case QuorumFormed(quorum, calls, is_new, stands, record):
                    self._formed(quorum, calls, is_new=is_new, stands=stands, record=record)
                case QuorumResent(quorum, call):
                    self.say(f"hands quorum {quorum.quorum_id} again")
                    self._hand(call, quorum, stands=True)
                case JoinRefused(call, error):
                    self._refuse(self.calls.pop(call, None), error)
                case Welcomed(session, welcome):
                    self._send(session, welcome)
                case HeartbeatAnswered(session, number, order):
                    self._send(session, HeartbeatAck(number, self.machine.presence.beat_interval_s, order))
                case Ordered(order, sessions):
                    self.say(f"orders {order.phase} {order.quorum_id} {order.upto or ''} ({order.reason})")
                    for session in sessions:
                        self._may_die()
                        self._send(session, order)
                case SessionRefused(session, error, reason):
                    self._dismiss(session, Goodbye(reason) if error is None else JoinRejected(0, error))
        self._timer.set(self.machine.deadline(now))

    def _formed(
        self, quorum: Quorum, calls: tuple[int, ...], *, is_new: bool, stands: bool, record: QuorumRecord | None
    ) -> None:
        self._fire_crash()
        if self.world.is_traced and is_new:
            members = " ".join(f"{p.replica_id}/{p.incarnation}@{p.step}" for p in quorum.participants)
            self.say(f"forms quorum {quorum.quorum_id}{'' if stands else ' (does not stand)'}: {members}")
        if record is not None:
            self.site.journal.record = record
            self._may_die()
        self.site.checkers.formed(quorum, stands=stands)
        for call in calls:
            self._may_die()
            self._hand(call, quorum, stands=stands)

    def _hand(self, call: int, quorum: Quorum, *, stands: bool) -> None:
        waiting = self.calls.pop(call, None)
        if waiting is None:
            return
        self.site.checkers.told(quorum, self.site.journal.record)
        if waiting.session is None:
            waiting.end.send(UnaryAnswer(waiting.number, quorum))
        else:
            self._send(waiting.session, JoinAccepted(waiting.number, quorum, stands))

    def _refuse(self, call: _Call | None, error: LighthouseError) -> None:
        if call is None:
            return
        self.say(f"refuses a join: {error}")
        if call.session is None:
            call.end.send(UnaryAnswer(call.number, error))
        else:
            self._send(call.session, JoinRejected(call.number, error))

    def _dismiss(self, session: int, word: Goodbye | JoinRejected) -> None:
        end = self.sessions.pop(session, None)
        if end is None:
            return
        self.say(f"ends session {session}: {word}")
        end.send(word)
        end.close()
        self.after(0, self._ended, end)

    def _send(self, session: int, message: Any) -> None:
        end = self.sessions.get(session)
        if end is not None:
            end.send(message)

    # -- its end

    def arm_crash(self, effects: int, *, patience_s: float) -> None:
        """Die so many effects after the next quorum has formed; if none does in time, after any."""
        self._armed = effects
        self.after(patience_s, self._fire_crash)

    def _fire_crash(self) -> None:
        if self._armed is not None:
            self.crash_in, self._armed = self._armed, None

    def _may_die(self) -> None:
        if self.crash_in is None:
            return
        self.crash_in -= 1
        if self.crash_in < 0:
            self.world.counts["crashed while telling"] += 1
            self.site.kill(self.world.random.choice((0.05, 0.5, 2.0)))
            raise Died

    def _die(self) -> None:
        self.say("is killed")
        self.site.network.end_all(self)
