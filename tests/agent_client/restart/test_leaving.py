"""What is interrupted and still runs: each test compares all that is said, deadline by deadline."""

from agent_client.restart.rules.events import Interrupt, Kill
from agent_client.restart.rules.interrupt_timer import InterruptTimer


def said(leaving: InterruptTimer, until: float) -> list[tuple[float, Interrupt | Kill]]:
    """With when it was said."""
    effects: list[tuple[float, Interrupt | Kill]] = []
    while (at := leaving.deadline) is not None and at <= until:
        effects += [(at, effect) for effect in leaving.tick(at)]
        assert leaving.tick(at) == []
        later = leaving.deadline
        assert later is None or later > at
    return effects


def test_who_runs_is_left_alone():
    leaving = InterruptTimer(1.0, 3.0)
    assert (leaving.deadline, leaving.tick(1000.0)) == (None, [])


def test_it_is_interrupted_again_and_again_and_then_killed_once():
    leaving = InterruptTimer(1.0, 3.0)
    leaving.begin("why", 10.0)
    again = Interrupt("why")
    killed = Kill("still runs 3 s after its interruption: why")
    assert said(leaving, 1000.0) == [(10.0, again), (11.0, again), (12.0, again), (13.0, killed)]


def test_who_has_ended_in_time_is_told_nothing_more():
    leaving = InterruptTimer(1.0, 3.0)
    leaving.begin("why", 10.0)
    assert said(leaving, 11.5) == [(10.0, Interrupt("why")), (11.0, Interrupt("why"))]
    leaving.end()
    assert said(leaving, 1000.0) == []


def test_the_next_time_has_a_limit_of_its_own():
    leaving = InterruptTimer(5.0, 3.0)
    leaving.begin("one", 10.0)
    leaving.end()
    leaving.begin("two", 12.0)
    killed = Kill("still runs 3 s after its interruption: two")
    assert said(leaving, 1000.0) == [(12.0, Interrupt("two")), (15.0, killed)]
