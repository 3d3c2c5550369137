"""The lighthouse's machine among dumb managers: what it says is carried to them, and both are checked."""

from collections.abc import Iterable
from typing import Any

from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import (
    Effect,
    Event,
    HeartbeatAnswered,
    Joined,
    JoinRefused,
    Ordered,
    QuorumFormed,
    QuorumResent,
    SessionEnded,
    SessionRefused,
    WasLate,
    Welcomed,
    Withdrawn,
)
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import (
    HeartbeatAck,
    HoldState,
    JoinAccepted,
    JoinRejected,
    QuorumOrder,
    QuorumPhase,
)
from tests.lighthouse.builders import AnswersOnly
from tests.lighthouse.dumb_manager import Closed, DumbManager
from tests.lighthouse.recount import recount

NAMES = "abcd"


class Stage:
    """Feeds the machine, carries what it says to the managers, and checks both."""

    def __init__(self, config: QuorumConfig) -> None:
        self.config = config
        self.machine = AnswersOnly(config)
        self.now = 0.0
        self.numbers = 0
        self.managers = {name: DumbManager(name) for name in NAMES}
        self.cut_off: list[DumbManager] = []
        self.waiting: dict[int, int | None] = {}  # call -> session
        self.open: set[int] = set()
        self.record: QuorumRecord | None = None
        self.formed: dict[int, Quorum] = {}
        self.standing: list[Quorum] = []

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    # -- to the machine

    def feed_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.feed(event)

    def feed(self, event: Event) -> None:
        match event:
            case Joined():
                self.waiting[event.call] = event.session
            case Withdrawn(call):
                self.waiting.pop(call, None)
            case SessionEnded(session):
                self.close(session)
            case _:
                self.open |= {event.session} if hasattr(event, "hello") else set()
        self.perform(list(self.machine.handle(event, self.now)))

    def tick(self) -> None:
        self.perform(list(self.machine.tick(self.now)))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.carry(effect)
        assert self.machine.tick(self.now) == [], "a tick at the same moment finds nothing left to do"
        due = self.machine.deadline(self.now)
        assert due is None or due > self.now
        recount(self.machine, self.now)
        assert set(self.machine.joins._calls) == set(self.waiting), "a call waits that nobody will answer"
        assert set(self.machine.presence._sessions) <= self.open

    # -- to the managers

    def carry(self, effect: Effect) -> None:
        match effect:
            case QuorumFormed():
                self.check_formed(effect)
                for call in effect.calls:
                    self.answer(call, JoinAccepted(call, effect.quorum, effect.stands))
            case QuorumResent(quorum, call):
                self.answer(call, JoinAccepted(call, quorum, True))
            case JoinRefused(call, error):
                self.answer(call, JoinRejected(call, error))
            case Ordered(order, sessions):
                self.check_order(order)
                for session in sessions:
                    assert session in self.open
                    self.send(session, order)
            case HeartbeatAnswered(session, number, order):
                self.send(session, HeartbeatAck(number, 1.0, order))
            case Welcomed(session, welcome):
                self.send(session, welcome)
            case SessionRefused(session, error):
                self.send(session, Closed(error))
                self.close(session)

    def answer(self, call: int, message: object) -> None:
        assert call in self.waiting, "a call that does not wait is answered"
        session = self.waiting.pop(call)
        if session is not None:
            self.send(session, message)

    def send(self, session: int, message: object) -> None:
        for manager in self.managers.values():
            if manager.session == session:
                manager.inbox.append(message)

    def close(self, session: int) -> None:
        self.open.discard(session)
        self.waiting = {call: by for call, by in self.waiting.items() if by != session}

    # -- checks

    def check_formed(self, formed: QuorumFormed) -> None:
        quorum, config = formed.quorum, self.config
        if formed.record is not None:
            self.record = formed.record
            assert formed.record.quorum_id == quorum.quorum_id
        known = self.formed.get(quorum.quorum_id)
        if known is None:
            assert quorum.quorum_id > max(self.formed, default=0), "ids only grow"
            assert formed.is_new
            assert formed.record is not None
        else:
            assert [p.identity for p in known.participants] == [p.identity for p in quorum.participants]
            assert not formed.is_new
        assert len(quorum.participants) >= config.min_replicas
        assert not config.allowed_sizes or len(quorum.participants) in config.allowed_sizes
        for older in self.standing:
            assert not self.could_go_on(older), f"{older.quorum_id} goes on beside {quorum.quorum_id}"
        self.formed[quorum.quorum_id] = quorum
        if formed.stands:
            assert config.stands
            assert known is None
            assert all(p.watched for p in quorum.participants)
            self.standing = [*self.standing[-5:], quorum]

    def could_go_on(self, quorum: Quorum) -> bool:
        """All its participants may let their ranks into a further step of it."""
        everybody = {(m.name, m.incarnation): m for m in [*self.cut_off, *self.managers.values()]}
        return all(
            (manager := everybody.get((p.replica_id, p.incarnation))) is not None
            and manager.may_come_to_grant(quorum.quorum_id, self.now, self.config.lease_s)
            for p in quorum.participants
        )

    def check_order(self, order: QuorumOrder) -> None:
        if order.phase is not QuorumPhase.RESUMED:
            return
        for p in self.formed[order.quorum_id].participants:
            manager = self.managers[p.replica_id]
            if manager.quorum is not None and manager.quorum.quorum_id == order.quorum_id:
                assert manager.granted <= order.upto, "left behind in a collective"
                assert manager.mode is not HoldState.JOINING or manager.granted == order.upto, "left out of a step"

    # -- what happens

    def hello(self, manager: DumbManager) -> None:
        if manager.session is None:
            self.feed_all(manager.hello(self.number(), self.number(), self.now))

    def ask(self, manager: DumbManager) -> None:
        if manager.wants_to_join:
            self.feed_all(manager.ask(self.number()))

    def leave(self, manager: DumbManager) -> None:
        self.feed_all(manager.leave())
        manager.restart(keeps_state=True)

    def replace(self, name: str) -> None:
        """It is cut off, and goes on as far as it may; another one is started in its place."""
        old = self.managers[name]
        events = old.lose_connection()
        self.cut_off = [*self.cut_off[-3:], old]
        self.managers[name] = DumbManager(name, old.life + 1)
        self.feed_all(events)

    def go_on(self, manager: DumbManager) -> None:
        """Everything that a manager does which is not hindered."""
        self.hello(manager)
        self.feed(manager.beat(self.now))
        manager.read(self.now, self.config.lease_s)
        if manager.session is None:
            return
        manager.advance(self.now)
        if manager.down:
            manager.revive_ranks()
        if manager.drains and manager.wants_to_join:
            self.leave(manager)
        self.ask(manager)
        manager.read(self.now, self.config.lease_s)

    def wait(self, seconds: float, going_on: Iterable[str] = (), every: float = 0.25) -> None:
        until = self.now + seconds
        while self.now < until:
            for name in going_on:
                self.go_on(self.managers[name])
            self.pass_time(min(self.now + every, until))

    def pass_time(self, until: float) -> None:
        while (due := self.machine.deadline(self.now)) is not None and due <= until:
            self.now = due
            self.tick()
        self.now = until

    def be_late(self, by_s: float) -> None:
        self.now += by_s
        self.feed(WasLate(by_s))

    def restart_lighthouse(self, *, keeps_journal: bool) -> None:
        for manager in self.managers.values():
            manager.lose_connection()
        self.waiting, self.open = {}, set()
        record = self.record if keeps_journal else None
        first = 1 if keeps_journal else max(self.formed, default=0) // 1000 * 1000 + 1000
        config = QuorumConfig(**{**vars_of(self.config), "first_quorum_id": first})
        self.machine = AnswersOnly(config, record=record, holders_until=self.now + config.lease_s)

    def settle(self) -> None:
        """Faults end: within a bounded time all that live are in one quorum, and steps go on (S5)."""
        config = self.config
        for manager in self.managers.values():
            if manager.drains and manager.session is None:
                manager.drains = False
        self.wait(2 * config.join_timeout_s + 4 * (config.heartbeat_timeout_s + config.lease_s) + 5, NAMES, every=0.4)
        steps = [manager.step for manager in self.managers.values()]
        if config.active is not None or config.allowed_sizes:
            return
        holding = {(m.quorum.quorum_id, m.mode) if m.quorum else None for m in self.managers.values()}
        assert len(holding) == 1
        if config.stands:
            assert holding == {(max(self.formed), HoldState.STANDING)}
            assert [p.replica_id for p in self.formed[max(self.formed)].participants] == list(NAMES)
        self.wait(3, NAMES, every=0.4)
        assert all(m.step > before for m, before in zip(self.managers.values(), steps, strict=True))


def vars_of(config: QuorumConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in QuorumConfig.__dataclass_fields__}
