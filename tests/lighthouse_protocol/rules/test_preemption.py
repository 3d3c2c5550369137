import math

from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.rules.preemption import (
    ANSWER_WITHIN_S,
    EXIT_MARGIN_S,
    MIN_SAVE_S,
    Action,
    most_urgent,
    plan,
    save_left_s,
)

NOW = 1_800_000_000.0


def notice(left_s: float | None, *, is_advice: bool = False, source: str = "file") -> PreemptionNotice:
    return PreemptionNotice(source, ends_at_unix_s=None if left_s is None else NOW + left_s, is_advice=is_advice)


notices = st.builds(
    lambda left_s, is_advice, source: notice(left_s, is_advice=is_advice, source=source),
    st.none() | st.floats(0, 900),
    st.booleans(),
    st.sampled_from(["aws", "file", "http"]),
)


@given(st.lists(notices))
def test_the_most_urgent_notice_is_not_advice_if_another_is_not_and_ends_first(given: list[PreemptionNotice]) -> None:
    found = most_urgent(given)
    assert (found is None) == (not given)
    for other in given:
        assert found is not None
        assert found.is_advice <= other.is_advice
        if found.is_advice == other.is_advice:
            ends = [math.inf if each.ends_at_unix_s is None else each.ends_at_unix_s for each in (found, other)]
            assert ends[0] <= ends[1]


@given(st.none() | notices, st.none() | st.integers(0, 3), st.floats(0, 10))
def test_a_group_leaves_for_a_notice_alone_and_saves_if_it_is_the_last(
    given: PreemptionNotice | None, others: int | None, waited_s: float
) -> None:
    planned = plan(given, others, NOW, NOW - waited_s)
    if given is None or given.is_advice:
        assert planned.action is Action.STAY
    elif others is None and waited_s < ANSWER_WITHIN_S:
        assert planned.action is Action.ASK
    elif others:
        assert planned.action is Action.DRAIN
    else:
        has_time = save_left_s(given, NOW) >= MIN_SAVE_S
        assert planned.action is (Action.SAVE if has_time else Action.DRAIN)
    assert planned.reason
    assert (planned.save_s > 0) == (planned.action is Action.SAVE)


def test_a_save_ends_before_the_host_does() -> None:
    assert plan(notice(120), 0, NOW).save_s == 120 - EXIT_MARGIN_S
    assert plan(notice(EXIT_MARGIN_S + MIN_SAVE_S), 0, NOW).action is Action.SAVE
    assert plan(notice(EXIT_MARGIN_S + MIN_SAVE_S - 0.1), 0, NOW).action is Action.DRAIN
    assert plan(notice(None), 0, NOW).action is Action.SAVE


def test_a_notice_whose_time_is_over_has_none_left() -> None:
    assert (notice(-5).left_s(NOW), notice(None).left_s(NOW)) == (0, None)
