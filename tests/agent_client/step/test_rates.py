from hypothesis import given
from hypothesis import strategies as st

from agent_client.step.rules.rates import Commit, StepRates

Story = list[tuple[float, int, int]]
"""Of each commit after the first: seconds since the one before, discarded steps in between, and new quorums."""
gaps = st.tuples(st.floats(0.001, 1000.0), st.integers(0, 2), st.integers(0, 1))


def replay(story: Story) -> StepRates:
    last = Commit(step=7, ended=9, quorum_id=4, at=100.0)
    rates = StepRates(last, last)
    for seconds, discards, quorums in story:
        last = Commit(last.step + 1, last.ended + 1 + discards, last.quorum_id + quorums, last.at + seconds)
        rates.add(last)
    return rates


def test_before_the_second_commit_nothing_is_known() -> None:
    rates = replay([])
    assert (rates.goodput, rates.last.rate_since(rates.first)) == (None, None)


def test_undisturbed_steps_are_all_goodput() -> None:
    rates = replay([(0.5, 0, 0), (1.5, 0, 0)])
    assert (rates.goodput, rates.last.rate_since(rates.first)) == (1.0, 1.0)


def test_a_step_after_a_discard_or_in_a_new_quorum_counts_as_the_mean() -> None:
    assert replay([(1.0, 0, 0), (3.0, 0, 0), (16.0, 1, 0)]).goodput == 6.0 / 20.0
    assert replay([(1.0, 0, 0), (3.0, 0, 0), (16.0, 0, 1)]).goodput == 6.0 / 20.0
    assert replay([(1.0, 0, 0), (3.0, 0, 0), (1.0, 1, 1)]).goodput == 1.0


@given(st.lists(gaps, min_size=1))
def test_goodput_is_a_share_and_falls_only_by_disturbances(story: Story) -> None:
    goodput = replay(story).goodput
    assert goodput is not None
    assert 0.0 <= goodput <= 1.0 + 1e-9
    if not any(discards or quorums for _, discards, quorums in story):
        assert abs(goodput - 1.0) < 1e-9


def test_a_rank_that_has_healed_counts_the_steps_of_its_peers() -> None:
    first = Commit(step=10, ended=1, quorum_id=4, at=100.0)
    assert Commit(step=60, ended=2, quorum_id=5, at=110.0).rate_since(first) == 5.0
