"""Short words for what comes by sessions, and what is said to them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lighthouse.job.events import (
    HeartbeatAnswered,
    Joined,
    Left,
    Ordered,
    QuorumFormed,
    SessionEnded,
    SessionHeartbeatReceived,
    SessionOpened,
    SessionRefused,
    Welcomed,
)
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.presence import JUDGED_AFTER_S
from lighthouse.job.records import QuorumConfig, QuorumRecord
from lighthouse.job.standing import Standing
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeldQuorum,
    Hello,
    HoldState,
    QuorumOrder,
    QuorumPhase,
    Welcome,
)
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.builders import FAR, AnswersOnly, group, ticked


def native(replica_id: str, step: int = 0, incarnation: str = "i1", **fields: object) -> Participant:
    """A replica group whose ranks are all watched: its quorums can stand."""
    return group(replica_id, step, incarnation, **({"watched": True} | fields))


def held(quorum_id: int, mode: str = "standing", granted: int = 0) -> HeldQuorum:
    return HeldQuorum(quorum_id, HoldState(mode), granted)


def secret_of(name: str) -> str:
    """Of the manager of group `name`, whose sessions these are."""
    return f"the secret of {name}"


def opened(session: int, who: Participant | str, secret: str | None = None, **levels: object) -> SessionOpened:
    """By its own manager, unless it shows another `secret`."""
    participant = native(who) if isinstance(who, str) else who
    shown = secret_of(participant.replica_id) if secret is None else secret
    return SessionOpened(session, Hello(participant, GroupReport(**levels), shown))


ANOTHER = "that of another manager"


def pulse(session: int, number: int = 1, **levels: object) -> SessionHeartbeatReceived:
    return SessionHeartbeatReceived(session, Heartbeat(number, GroupReport(**levels)))


def asks(call: int, session: int | None, who: Participant | str, **fields: object) -> Joined:
    """A join by a session."""
    participant = native(who, **fields) if isinstance(who, str) else replace(who, **fields)
    return Joined(call, participant, FAR, session)


def ended(session: int) -> SessionEnded:
    return SessionEnded(session)


def lose(machine: QuorumMachine, session: int, now: float) -> list[object]:
    """The connection of that session alone has ended, which is judged at `now`."""
    effects = machine.handle(ended(session), now - 1.2 * JUDGED_AFTER_S)
    return [*effects, *machine.tick(now)]


def left(session: int) -> Left:
    return Left(session)


def welcomed(session: int, order: QuorumOrder | None = None, beat_s: float = 1.0, lease_s: float = 5.0) -> Welcomed:
    return Welcomed(session, Welcome(beat_s, lease_s, order))


def echoed(session: int, number: int = 1, order: QuorumOrder | None = None) -> HeartbeatAnswered:
    return HeartbeatAnswered(session, number, order)


def stands(quorum_id: int, calls: tuple[int, ...], *participants: Participant) -> QuorumFormed:
    return QuorumFormed(Quorum(quorum_id, participants), calls, is_new=True, stands=True)


@dataclass(frozen=True, eq=False)
class Told:
    """Equal to an Ordered of that phase, to those sessions in any order, whose reason has all `words`."""

    phase: QuorumPhase
    sessions: frozenset[int]
    quorum_id: int
    upto: int
    words: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ordered)
            and (other.order.phase, frozenset(other.sessions)) == (self.phase, self.sessions)
            and (other.order.quorum_id, other.order.upto) == (self.quorum_id, self.upto)
            and all(word in other.order.reason for word in self.words)
        )


def told(phase: str, sessions: tuple[int, ...], *words: str, quorum_id: int = 1, upto: int = 0) -> Told:
    return Told(QuorumPhase(phase), frozenset(sessions), quorum_id, upto, words)


@dataclass(frozen=True, eq=False)
class Closed:
    """Equal to a SessionRefused of that session, with an error of that kind (None: in good order) and all `words`."""

    session: int
    kind: type[LighthouseError] | None
    words: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SessionRefused)
            and other.session == self.session
            and (type(other.error) if other.error is not None else None) == self.kind
            and all(word in f"{other.error} {other.reason}" for word in self.words)
        )


def closed(session: int, kind: type[LighthouseError] | None = None, *words: str) -> Closed:
    return Closed(session, kind, words)


def connected(
    names: str = "ab", now: float = 0.0, kind: type[QuorumMachine] = AnswersOnly, **config: object
) -> QuorumMachine:
    """Groups `names` have opened sessions 1, 2, ..."""
    machine = kind(QuorumConfig(**config))
    for session, name in enumerate(names, start=1):
        machine.handle(opened(session, name), now)
    return machine


def standing(
    names: str = "ab", now: float = 0.0, kind: type[QuorumMachine] = AnswersOnly, **config: object
) -> QuorumMachine:
    """Groups `names`, by sessions and calls 1, 2, ..., hold quorum 1, which stands and was formed for step 0."""
    machine = connected(names, now, kind, **config)
    for number, name in enumerate(names, start=1):
        machine.handle(asks(number, number, name), now)
    assert machine.standing.phase is QuorumPhase.STANDING
    return machine


def recalled(names: str = "ab", now: float = 0.0, **config: object) -> QuorumMachine:
    """`standing`, and then x has come by session 9 and asks with call 9: nobody has answered the recall yet."""
    machine = standing(names, now, **config)
    machine.handle(opened(9, "x"), now)
    assert machine.handle(asks(9, 9, "x"), now) == [told("recalled", tuple(range(1, len(names) + 1)), "1 waiting")]
    return machine


def resumed(names: str = "ab", upto: int = 4, now: float = 0.0, **config: object) -> QuorumMachine:
    """`recalled`, and all have answered; the last has granted the most."""
    machine = recalled(names, now, **config)
    for session in range(len(names), 0, -1):
        machine.handle(pulse(session, held=held(1, "recalled", upto if session == len(names) else upto - 1)), now)
    assert (machine.standing.phase, machine.standing.upto) == (QuorumPhase.RESUMED, upto)
    return machine


def may_form(standing: Standing, chosen: list[Participant], now: float) -> bool:
    """The standing quorum and its leases allow `chosen` to form a quorum."""
    return not standing.blocks_forming and now >= standing.leases_free_at(chosen)


def record_of(machine: QuorumMachine) -> QuorumRecord:
    """What was written down of the standing quorum."""
    return machine._make_record(stands=True)


def restarted(record: QuorumRecord | None, until: float = 5.0, **config: object) -> QuorumMachine:
    """Another lighthouse that has read `record`, at 0."""
    return AnswersOnly(QuorumConfig(**config), record=record, holders_until=until)


def pulsing(
    machine: QuorumMachine, levels: Mapping[int, Mapping[str, object]], start: float, stop: float, every: float = 1.0
) -> list[object]:
    """Each session of `levels` beats in [start, stop) with its levels; what is said but the echoes."""
    effects: list[object] = []
    now = start
    while now < stop:
        for session, said in levels.items():
            effects += machine.handle(pulse(session, **said), now)
        until = min(now + every, stop)
        effects += ticked(machine, now, until)
        now = until
    return [effect for effect in effects if not isinstance(effect, HeartbeatAnswered)]
