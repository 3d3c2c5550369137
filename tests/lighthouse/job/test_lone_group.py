"""A group that has lost its state does not train alone while the others still hold theirs."""

from collections.abc import Iterable

from lighthouse.job.events import QuorumFormed, QuorumResent
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.lineage import EARLIER_COUNTS_FOR_S
from lighthouse.job.records import Verdict
from lighthouse.job.status import explain
from lighthouse_protocol.messages.membership import Quorum
from tests.lighthouse.sessions import asks, connected, lose, native, opened, pulse, ticked

JOIN_TIMEOUT_S = 2.0


def formed(effects: Iterable[object]) -> list[Quorum]:
    return [effect.quorum for effect in effects if isinstance(effect, QuorumFormed)]


def at_work() -> tuple[QuorumMachine, Quorum]:
    """a and b at step 2082, and c, which has restarted and has no watch yet, are in a quorum that does not stand."""
    machine = connected("abc", join_timeout_s=JOIN_TIMEOUT_S)
    effects: list[object] = []
    for number, name in enumerate("abc", start=1):
        who = native(name, watched=False) if name == "c" else native(name, step=2082, tag_quorum_id=7)
        effects += machine.handle(asks(number, number, who), 0.0)
    [quorum] = formed(effects)
    return machine, quorum


def beat(machine: QuorumMachine, until: int, sessions: tuple[int, ...], start: int = 1) -> list[object]:
    effects: list[object] = []
    for now in range(start, until):
        for session in sessions:
            effects += machine.handle(pulse(session, now), float(now))
        effects += ticked(machine, float(now), now + 1.0)
    return effects


def test_a_member_that_never_received_a_quorum_that_does_not_stand_gets_it_again():
    machine, quorum = at_work()
    machine.handle(opened(9, "c"), 1.0)
    assert QuorumResent(quorum, 4, stands=False) in machine.handle(asks(4, 9, native("c", watched=True)), 1.0)
    assert formed(beat(machine, 30, (1, 2, 9))) == []


def test_a_member_that_received_it_waits_for_the_next_one():
    machine, quorum = at_work()
    assert machine.handle(asks(4, 3, native("c", seen_quorum_id=quorum.quorum_id)), 1.0) == []


def test_a_member_joins_the_next_one_if_another_has_already_given_up():
    machine, quorum = at_work()
    machine.handle(asks(4, 1, native("a", step=2082, tag_quorum_id=7, seen_quorum_id=quorum.quorum_id)), 1.0)
    assert machine.handle(asks(5, 3, native("c")), 1.0) == []


def test_a_restarted_member_waits_beyond_the_join_timeout_for_those_that_hold_the_state():
    machine, quorum = at_work()
    lose(machine, 3, 1.0)
    machine.handle(opened(9, native("c", incarnation="i2")), 2.0)
    machine.handle(asks(4, 9, native("c", incarnation="i2")), 2.0)
    assert formed(beat(machine, 12, (1, 2, 9), start=3)) == []
    assert machine.decision.verdict is Verdict.WAITING_FOR_STRAGGLERS
    assert explain(machine, 12.0) == "waiting for a, b, 590 s more at most; 1 of 3 joined, none with the newest state"
    holder = native("a", step=2082, tag_quorum_id=7, seen_quorum_id=quorum.quorum_id, commit_failures=1)
    [quorum] = formed(machine.handle(asks(5, 1, holder), 13.0))
    assert {member.replica_id: member.step for member in quorum.participants} == {"a": 2082, "c": 0}


def test_outsiders_with_the_same_state_wait_too():
    machine, _ = at_work()
    lose(machine, 3, 1.0)
    machine.handle(opened(8, native("d")), 2.0)
    machine.handle(asks(4, 8, native("d", step=2082, tag_quorum_id=7)), 2.0)
    machine.handle(opened(9, native("c", incarnation="i2")), 2.0)
    machine.handle(asks(5, 9, native("c", incarnation="i2")), 2.0)
    assert formed(beat(machine, 12, (1, 2, 8, 9), start=3)) == []


def test_it_does_not_wait_for_ever():
    machine, _ = at_work()
    lose(machine, 3, 1.0)
    machine.handle(opened(9, native("c", incarnation="i2")), 2.0)
    machine.handle(asks(4, 9, native("c", incarnation="i2")), 2.0)
    [alone] = formed(beat(machine, int(EARLIER_COUNTS_FOR_S) + 5, (1, 2, 9), start=3))
    assert [member.replica_id for member in alone.participants] == ["c"]


def test_lost_holders_are_not_waited_for():
    machine, _ = at_work()
    for session in (1, 2, 3):
        lose(machine, session, 1.0)
    machine.handle(opened(9, native("c", incarnation="i2")), 2.0)
    assert formed([*machine.handle(asks(4, 9, native("c", incarnation="i2")), 2.0), *beat(machine, 12, (9,), start=3)])
