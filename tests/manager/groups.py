"""Short words for what happens to a manager's machine and what it says."""

from typing import Any

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import HeldQuorum, HoldState, QuorumPhase
from manager.group import events
from manager.group.events import PendingVote
from manager.group.machine import GroupMachine
from tests.manager.builders import ask, member

LEASE_UNTIL = 4.0
"""0.8 of the 5 s since the first beat was sent at 0."""


IDENTITY = ("replica_id", "incarnation", "wire_id", "address", "store_address", "group_world_size")


def vote(
    call: int, rank: int, step: int, yes: bool = True, quorum_id: int | None = 1, wants: bool = False
) -> PendingVote:
    return PendingVote(call, rank, step, yes, quorum_id, wants)


def order(phase: str, upto: int = 0, quorum_id: int = 1, reason: str = "") -> session.QuorumOrder:
    return session.QuorumOrder(quorum_id, QuorumPhase(phase), upto, reason)


def told(message: session.ToManager) -> events.Received:
    return events.Received(message)


def echo(number: int, order: session.QuorumOrder | None = None) -> events.Received:
    return events.Received(session.HeartbeatAck(number, 1.0, order))


def handed(join: int, quorum: Quorum, stands: bool = True) -> events.Received:
    return events.Received(session.JoinAccepted(join, quorum, stands))


def formed(quorum_id: int = 1, step: int = 0, names: str = "ab", **fields: object) -> Quorum:
    return Quorum(quorum_id, tuple(member(name, step, tag_quorum_id=0, **fields) for name in names))


def held(mode: str = "standing", granted: int = 0, quorum_id: int = 1) -> HeldQuorum:
    return HeldQuorum(quorum_id, HoldState(mode), granted)


def unwatched(size: int = 2, name: str = "a", **options: Any) -> GroupMachine:
    """Its session is open and welcomed at 0; beat 1 was sent and echoed: the lease is valid until LEASE_UNTIL."""
    machine = GroupMachine(
        Participant(name, address=f"{name}:1", store_address=f"{name}:2", group_world_size=size), "L", **options
    )
    machine.handle(events.SessionOpened(), 0)
    machine.handle(told(session.Welcome(1.0, 5.0)), 0)
    machine.handle(echo(1), 0)
    return machine


def watched(size: int = 2, name: str = "a") -> GroupMachine:
    """And its ranks' watches 1, 2, ... are open; beat 2 said that they are there."""
    machine = unwatched(size, name)
    for rank in range(size):
        machine.handle(events.WatchOpened(rank + 1, rank, f"w{rank}"), 0)
    return machine


def joined(size: int = 2, step: int = 0, **fields: object) -> GroupMachine:
    """And all ranks have asked by calls 1, 2, ...: join 1 was sent."""
    machine = watched(size)
    for rank in range(size):
        machine.handle(ask(rank + 1, rank, step, **({"tag_quorum_id": 0} | fields)), 0)
    assert machine.session.is_joining
    return machine


def holding(size: int = 2, step: int = 0, names: str = "ab") -> GroupMachine:
    """And were handed quorum 1, which stands and was formed for `step`; the beats so far are 1 and 2."""
    machine = joined(size, step)
    answers = machine.handle(handed(1, formed(1, step, names)), 0)
    assert sum(isinstance(effect, events.QuorumAnswered) for effect in answers) == size
    assert (machine.held, machine.session._heartbeats) == (held(granted=step), 2)
    return machine


def past(size: int = 2) -> GroupMachine:
    """And all ranks have committed step 0."""
    machine = holding(size)
    for rank in range(size):
        effects = machine.handle(vote(50 + rank, rank, 0), 0.1)
    assert [effect.outcome.commit for effect in effects] == [True] * size
    return machine


FOR_PEOPLE = events.MissingChanged | events.WaitChanged | events.FailureReported


def done(machine: GroupMachine, event: events.Event, now: float) -> list[events.Effect]:
    """What follows, but for what is only for people."""
    return [effect for effect in machine.handle(event, now) if not isinstance(effect, FOR_PEOPLE)]
