"""An honest manager of one replica group, the dumb way: what it holds, and what it does with what it reads.

It has no timers and no ranks; whoever plays it says when it beats, reads, steps and asks.
"""

import copy
from dataclasses import dataclass, field, replace

from lighthouse.quorum.rules.events import (
    Event,
    Joined,
    Left,
    SessionEnded,
    SessionHeartbeatReceived,
    SessionOpened,
    Withdrawn,
)
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRejected,
    QuorumOrder,
    QuorumPhase,
    Welcome,
)
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.sessions import native

GRANTING = (HoldState.STANDING, HoldState.RECALLED, HoldState.RESUMED)
LEASE_SHARE = 0.8


@dataclass
class Closed:
    """The lighthouse has ended the session."""

    error: LighthouseError | None


@dataclass
class DumbManager:
    """`step` is the one that it is at; in flight while it is `granted`. `inbox` was said and not read yet."""

    name: str
    life: int = 1
    restarts: int = 0
    step: int = 0
    tag: int = 0
    seen: int = 0
    failures: int = 0
    session: int | None = None
    inbox: list[object] = field(default_factory=list)
    unopened: JoinAccepted | None = None
    quorum: Quorum | None = None
    mode: HoldState = HoldState.REVOKED
    granted: int = 0
    upto: int = 0
    lease_until: float = 0.0
    join: Participant | None = None
    call: int = 0
    drains: bool = False
    down: str = ""
    beats: int = 0
    sent_at: dict[int, float] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"m{self.life}.{self.restarts}"

    @property
    def me(self) -> Participant:
        fields = {"tag_quorum_id": self.tag, "seen_quorum_id": self.seen, "commit_failures": self.failures}
        return native(self.name, self.step, self.incarnation, **fields)

    @property
    def levels(self) -> GroupReport:
        held = HeldQuorum(self.quorum.quorum_id, self.mode, self.granted) if self.quorum else None
        return GroupReport(held, self.drains, self.down)

    # -- what it may do

    def grants(self, now: float) -> bool:
        """It may let its ranks into a further step by itself."""
        free = self.mode is HoldState.STANDING or (self.mode is HoldState.RESUMED and self.granted < self.upto)
        return self.quorum is not None and free and now < self.lease_until

    def may_come_to_grant(self, quorum_id: int, now: float, lease_s: float) -> bool:
        """Under that quorum; as it is, or when it has read some of what is on its way."""
        later = copy.copy(self)
        later.inbox = list(self.inbox)
        while not (later.quorum and later.quorum.quorum_id == quorum_id and later.grants(now)):
            if not later.inbox:
                return False
            later.read_one(now, lease_s)
        return True

    @property
    def wants_to_join(self) -> bool:
        if self.join is not None or self.down:
            return False
        if self.quorum is None or self.mode in (HoldState.REVOKED, HoldState.JOINING):
            return True
        return self.mode is HoldState.RESUMED and self.granted >= self.upto and self.step > self.granted

    def advance(self, now: float) -> None:
        """One half of a step: it commits what is in flight, or goes into the next."""
        if self.quorum is None:
            return
        if self.step == self.granted and self.mode in GRANTING:
            self.step, self.tag = self.granted + 1, self.quorum.quorum_id
        elif self.step == self.granted + 1 and self.grants(now):
            self.granted += 1

    def fail(self) -> None:
        if self.quorum is not None and self.step == self.granted and self.mode in GRANTING:
            self.mode, self.failures = HoldState.REVOKED, 1

    # -- what it says

    def hello(self, session: int, call: int, now: float) -> list[Event]:
        self.session, self.inbox, self.sent_at = session, [], {}
        events: list[Event] = [SessionOpened(session, Hello(self.me, self.levels)), self.beat(now)]
        if self.join is not None:
            events.append(self._ask(call))
        return events

    def beat(self, now: float) -> Event:
        assert self.session is not None
        self.beats += 1
        self.sent_at[self.beats] = now
        return SessionHeartbeatReceived(self.session, Heartbeat(self.beats, self.levels))

    def ask(self, call: int) -> list[Event]:
        assert self.wants_to_join
        if self.quorum is not None and self.mode is HoldState.RESUMED:
            self.mode = HoldState.JOINING
        self.join = self.me
        return [self._ask(call)] if self.session is not None else []

    def _ask(self, call: int) -> Event:
        assert self.join is not None
        self.call = call
        return Joined(call, self.join, 1e9, self.session)

    def withdraw(self) -> list[Event]:
        was_asked, self.join, self.unopened = self.join is not None and self.session is not None, None, None
        return [Withdrawn(self.call)] if was_asked else []

    def leave(self) -> list[Event]:
        assert self.session is not None
        return [*self.withdraw(), Left(self.session)]

    # -- what happens to it

    def lose_connection(self) -> list[Event]:
        session, self.session, self.inbox, self.unopened = self.session, None, [], None
        return [SessionEnded(session)] if session is not None else []

    def restart(self, *, keeps_state: bool) -> None:
        """Another process; it may have restored its state from a checkpoint."""
        self.__init__(
            self.name,
            self.life + 1,
            step=self.step if keeps_state else 0,
            tag=self.tag if keeps_state else 0,
        )

    def lose_ranks(self, now: float) -> list[Event]:
        events = self.withdraw()
        self.down, self.mode = "rank 0 has ended", HoldState.REVOKED
        return [*events, self.beat(now)] if self.session is not None else []

    def revive_ranks(self) -> None:
        self.down, self.restarts, self.failures = "", self.restarts + 1, 0

    # -- what it reads

    def read(self, now: float, lease_s: float) -> None:
        while self.inbox:
            self.read_one(now, lease_s)

    def read_one(self, now: float, lease_s: float) -> None:
        self._read(self.inbox.pop(0), lease_s)
        self._open(now)

    def _read(self, message: object, lease_s: float) -> None:
        match message:
            case Welcome(_, _, order):
                self._obey(order)
            case HeartbeatAck(number, _, order):
                self._obey(order)
                if number in self.sent_at:
                    self.lease_until = max(self.lease_until, self.sent_at[number] + LEASE_SHARE * lease_s)
            case QuorumOrder():
                self._obey(message)
            case JoinAccepted(call):
                if self.join is not None and call == self.call:
                    self.unopened = message
            case JoinRejected(call):
                if self.join is not None and call == self.call:
                    self.join = None
            case Closed():
                self.session, self.inbox, self.unopened = None, [], None
            case _:
                raise AssertionError(f"a manager is not told {message}")

    def _open(self, now: float) -> None:
        handed = self.unopened
        if handed is not None and (now < self.lease_until or not handed.stands):
            self.unopened = None
            self._take(handed.quorum, handed.stands)

    def _obey(self, order: QuorumOrder | None) -> None:
        if order is None:
            return
        if self.unopened and (order.quorum_id, order.phase) == (self.unopened.quorum.quorum_id, QuorumPhase.REVOKED):
            self.join = self.unopened = None
        if self.quorum is None or order.quorum_id != self.quorum.quorum_id:
            return
        if self.mode not in GRANTING:
            return
        match order.phase:
            case QuorumPhase.RECALLED:
                self.mode = HoldState.RECALLED
            case QuorumPhase.RESUMED:
                self.mode, self.upto = HoldState.RESUMED, order.upto
            case QuorumPhase.REVOKED:
                self.mode = HoldState.REVOKED
            case QuorumPhase.NONE | QuorumPhase.RETURNING | QuorumPhase.STANDING:
                pass

    def _take(self, quorum: Quorum, stands: bool) -> None:
        assert quorum.quorum_id >= self.seen, "an id went back"
        assert self.join in [replace(p, step=self.join.step) for p in quorum.participants if self.join], "not of it"
        self.join, self.failures = None, 0
        self.seen = quorum.quorum_id
        self.step = max(p.step for p in quorum.participants)
        if stands:
            self.quorum, self.mode, self.granted, self.upto = quorum, HoldState.STANDING, self.step, 0
        else:
            self.quorum, self.step, self.tag = None, self.step + 1, quorum.quorum_id
