"""What a rank says of its heal."""

from agent_client.progress.activity import KEPT_S, Activity
from lighthouse_protocol.messages.progress import HealProgress
from tests.agent_client.progress.test_progress import Clock


def test_a_heal_is_told_while_it_goes_on_and_for_a_while_after():
    clock = Clock()
    own = Activity(clock)
    assert own.take_sample().sample.heal is None
    mark = own.heal_begins("a", 17)
    assert own.take_sample().sample.heal == HealProgress(1, "a", 17)
    clock.now += 2
    mark.record_bytes("a", 30, 100)
    clock.now += 1
    assert own.take_sample().sample.heal == HealProgress(1, "a", 17, 30, 100, 3.0)
    mark.record_bytes("a", 100, 100)
    mark.mark_done()
    clock.now += KEPT_S - 0.1
    assert own.take_sample().sample.heal == HealProgress(1, "a", 17, 100, 100, 3.0, is_over=True)
    clock.now += 0.1
    assert own.take_sample().sample.heal is None


def test_bytes_are_progress():
    """A rank that heals for long moves, as long as something arrives."""
    clock = Clock()
    own = Activity(clock)
    mark = own.heal_begins("a", 17)
    clock.now += 50
    mark.record_bytes("a", 30, 100)
    clock.now += 5
    assert own.take_sample().since == clock.now - 5


def test_another_heal_has_another_number_and_one_that_failed_is_none():
    own = Activity(Clock())
    own.heal_begins("a", 17).mark_failed()
    assert own.take_sample().sample.heal is None
    own.heal_begins("c", 18)
    assert own.take_sample().sample.heal == HealProgress(2, "c", 18)
