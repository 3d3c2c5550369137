"""What happens to members is among the effects of the machine, in the order in which it happens."""

from lighthouse.job import events
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.presence import JUDGED_AFTER_S
from lighthouse.job.records import QuorumConfig
from tests.lighthouse.builders import answers, beat, join
from tests.lighthouse.sessions import ended, held, pulse, standing


def at_work(names: str = "ab") -> QuorumMachine:
    return standing(names, kind=QuorumMachine, heartbeat_timeout_s=5.0)


def told(effects: list[events.QuorumEffect]) -> list[events.QuorumEffect]:
    """What is told of members, without the answers."""
    return [effect for effect in effects if not answers([effect])]


def test_a_loss_names_the_quorum_that_ends_and_comes_before_its_end():
    machine = at_work()
    assert machine.handle(ended(2), 1) == []
    effects = machine.tick(1 + JUDGED_AFTER_S)
    assert effects[:2] == [events.MemberLost("b", 1, "its connection was lost", last_seen_at=1), events.GridChanged()]
    assert [type(effect) for effect in effects[2:]] == [events.Ordered]
    assert machine.tick(2) == [], "what was told once is not told again"


def test_that_connections_were_cut_is_said_once():
    machine = at_work("abc")
    effects = [e for session in (1, 3) for e in machine.handle(ended(session), 1)] + list(machine.tick(1.008))
    assert effects == [events.ConnectionsCut(("a", "c"), 5.0)]


def test_a_silent_member_is_lost_with_the_moment_when_it_was_last_heard_of():
    machine = at_work("abc")
    for now in range(1, 9):
        for session in (1, 3):
            effects = machine.handle(pulse(session, held=held(1)), now)
            if lost := [effect for effect in effects if isinstance(effect, events.MemberLost)]:
                assert lost == [events.MemberLost("b", 1, "it fell silent", 0)]
                return
    raise AssertionError("b is not lost")


def test_a_group_of_no_standing_quorum_is_lost_to_none():
    machine = QuorumMachine(QuorumConfig(heartbeat_timeout_s=5.0))
    assert told(machine.handle(beat("a"), 0)) == [events.MemberJoined("a")]
    assert told(machine.tick(6)) == [events.MemberLost("a", None, "it fell silent", 0), events.GridChanged()]
    assert told(machine.handle(beat("a"), 7)) == [events.MemberReturned("a", "is back"), events.GridChanged()]


def test_another_incarnation_of_a_group_without_a_session_is_lost_too():
    machine = QuorumMachine(QuorumConfig())
    machine.handle(join(1, "a", incarnation="i1"), 0)
    effects = machine.handle(join(2, "a", incarnation="i2"), 1)
    assert events.MemberLost("a", None, "its ranks have restarted") in effects
