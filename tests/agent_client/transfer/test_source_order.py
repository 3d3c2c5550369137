"""The rules of a transfer: which source is read next, from which byte, and when there is none left."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.transfer.rules.source_order import (
    FIRST_PAUSE_S,
    TRIES,
    Broken,
    Failed,
    Read,
    Refused,
    SourceOrder,
)


def machine(*sources: str, deadline: float = 100.0, silence_s: float = 10.0) -> SourceOrder:
    return SourceOrder(sources or ("a", "b"), deadline=deadline, silence_s=silence_s)


def test_goes_on_where_it_broke_after_a_pause() -> None:
    transfer = machine()
    transfer.begin(now=0)
    assert transfer.handle(Broken(500, "reset"), now=2) == Read("a", 500, at=2 + FIRST_PAUSE_S, silence_s=10)
    assert transfer.handle(Broken(500, "reset"), now=3) == Read("a", 500, at=3 + 2 * FIRST_PAUSE_S, silence_s=10)


def test_a_source_that_makes_progress_may_break_as_often_as_it_likes() -> None:
    transfer = machine()
    transfer.begin(now=0)
    for received in range(1, 10 * TRIES):
        assert transfer.handle(Broken(received, "reset"), now=2) == Read("a", received, 2 + FIRST_PAUSE_S, 10)


def test_one_that_does_not_is_passed_over_and_the_next_begins_at_byte_0() -> None:
    transfer = machine()
    transfer.begin(now=0)
    actions = [transfer.handle(Broken(500, "reset"), now=2) for _ in range(TRIES)]
    assert [action.source for action in actions if isinstance(action, Read)] == ["a"] * (TRIES - 1) + ["b"]
    assert actions[-1] == Read("b", 0, at=2, silence_s=98)


def test_the_last_one_may_be_silent_until_the_deadline() -> None:
    transfer = machine(deadline=50)
    transfer.begin(now=0)
    assert transfer.handle(Refused("silent"), now=10) == Read("b", 0, at=10, silence_s=40)


def test_when_none_is_left_it_names_each_with_its_reason() -> None:
    transfer = machine()
    transfer.begin(now=0)
    transfer.handle(Refused("409"), now=1)
    for _ in range(TRIES - 1):
        transfer.handle(Broken(0, "no route"), now=2)
    failed = transfer.handle(Broken(0, "no route"), now=2)
    assert failed == Failed((("a", "409"), ("b", f"no route ({TRIES} times in a row)")), is_late=False)


def test_needs_a_source() -> None:
    with pytest.raises(ValueError):
        SourceOrder([], deadline=1, silence_s=1)


events = st.one_of(
    st.builds(Broken, st.integers(0, 100), st.just("broken")),
    st.builds(Refused, st.just("refused")),
)


@settings(max_examples=300)
@given(st.integers(1, 4), st.lists(st.tuples(events, st.floats(0, 5)), max_size=60), st.floats(1, 60))
def test_whatever_happens(count: int, story: Sequence[tuple[Broken | Refused, float]], deadline: float) -> None:
    """Sources are read in order, never again once passed over; offsets are what was received; it ends in time."""
    sources = [f"s{number}" for number in range(count)]
    transfer, now = SourceOrder(sources, deadline=deadline, silence_s=5), 0.0
    action = transfer.begin(now)
    order = [action.source] if isinstance(action, Read) else []
    for event, passes_s in story:
        if isinstance(action, Failed):
            break
        assert now <= action.at <= now + FIRST_PAUSE_S * 2**TRIES
        assert 0 < action.silence_s <= deadline - now
        now += passes_s
        before, action = action, transfer.handle(event, now)
        if isinstance(action, Failed):
            assert action.is_late == (now >= deadline)
            assert action.is_late or [source for source, _ in action.reasons] == sources
        elif action.source == before.source:
            assert isinstance(event, Broken)
            assert action.offset == event.received
        else:
            assert action.offset == 0
            order.append(action.source)
    assert order == sources[: len(order)]
