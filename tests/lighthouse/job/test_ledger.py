"""Reports of groups as sums: no number goes back or jumps, whatever restarts."""

from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.progress import NOTHING, Ledger, difference
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts, GroupReport, HeldQuorum, HoldState


def holds(counts: GroupCounts | None = NOTHING, mode: str = "standing") -> GroupReport:
    return GroupReport(HeldQuorum(1, HoldState(mode), 3), counts=counts)


FULL = GroupCounts(9, Discards(1, 2, 3, 4), 90.0, HealTotals(2, 5.0, 1000))


def test_the_first_report_adds_nothing_and_a_later_one_what_is_new():
    ledger = Ledger()
    assert ledger.take("a", holds(FULL), 0.0) == NOTHING
    later = GroupCounts(10, Discards(1, 3, 3, 4), 95.0, HealTotals(3, 7.0, 1500))
    assert ledger.take("a", holds(later), 5.0) == GroupCounts(1, Discards(rank_lost=1), 5.0, HealTotals(1, 2.0, 500))
    assert ledger.take("a", holds(later), 6.0) == NOTHING


def test_a_manager_that_has_restarted_counts_from_zero_and_nothing_goes_back():
    ledger = Ledger()
    ledger.take("a", holds(FULL), 0.0)
    assert ledger.take("a", GroupReport(counts=NOTHING), 1.0) == NOTHING
    assert ledger.take("a", holds(GroupCounts(commits=2)), 2.0) == GroupCounts(commits=2)


def test_a_manager_that_does_not_count_changes_nothing():
    ledger = Ledger()
    assert ledger.take("a", holds(None), 0.0) == NOTHING
    assert ledger.goodput(10.0) is None


class TestGoodput:
    def test_begins_with_the_first_quorum_and_counts_committed_steps_only(self):
        ledger = Ledger()
        ledger.take("a", GroupReport(counts=NOTHING), 0.0)
        assert ledger.goodput(50.0) is None
        ledger.take("a", holds(), 100.0)
        ledger.take("a", holds(GroupCounts(3, step_s=30.0)), 140.0)
        assert (ledger.group_s(140.0), ledger.goodput(140.0)) == (40.0, 0.75)

    def test_a_group_that_is_lost_still_has_time(self):
        ledger = Ledger()
        for name in "ab":
            ledger.take(name, holds(), 0.0)
        ledger.take("a", holds(GroupCounts(1, step_s=100.0)), 100.0)  # b is silent
        assert ledger.goodput(100.0) == 0.5

    def test_a_group_that_leaves_in_good_order_has_none_from_then_on(self):
        ledger = Ledger()
        for name in "ab":
            ledger.take(name, holds(), 0.0)
        ledger.take("b", holds(GroupCounts(1, step_s=50.0), mode="leaving"), 50.0)
        ledger.take("a", holds(GroupCounts(2, step_s=100.0)), 100.0)
        assert (ledger.group_s(100.0), ledger.goodput(100.0)) == (150.0, 1.0)
        ledger.left("b", 100.0)
        assert ledger.group_s(100.0) == 150.0

    def test_a_group_that_is_forgotten_keeps_the_time_that_it_had(self):
        ledger = Ledger()
        ledger.take("a", holds(), 0.0)
        ledger.keep({"b"}, 10.0)
        ledger.keep({"b"}, 20.0)
        assert ledger.group_s(30.0) == 10.0

    def test_it_is_never_above_one(self):
        """A step that began before the lighthouse has restarted is told in whole."""
        ledger = Ledger()
        ledger.take("a", holds(), 0.0)
        ledger.take("a", holds(GroupCounts(1, step_s=30.0)), 1.0)
        assert ledger.goodput(1.0) == 1.0


numbers = st.integers(0, 5)
drawn_counts = st.builds(
    GroupCounts,
    numbers,
    st.builds(Discards, numbers, numbers, numbers, numbers),
    st.floats(0, 9),
    st.builds(HealTotals, numbers, st.floats(0, 9), numbers),
)


@given(drawn_counts, drawn_counts)
def test_a_difference_is_never_below_zero(before: GroupCounts, now: GroupCounts):
    new = difference(before, now)
    told = new.discards
    assert min(new.commits, new.step_s, new.healed.heals, new.healed.seconds, new.healed.bytes) >= 0
    assert min(told.group_lost, told.rank_lost, told.revoked, told.voted_no) >= 0


@given(st.lists(st.tuples(st.sampled_from("ab"), drawn_counts, st.booleans()), max_size=12))
def test_the_time_of_groups_never_goes_back(reports: list[tuple[str, GroupCounts, bool]]):
    ledger, before = Ledger(), 0.0
    for now, (name, counts, leaves) in enumerate(reports):
        ledger.take(name, holds(counts, "leaving" if leaves else "standing"), float(now))
        assert ledger.group_s(float(now)) >= before
        before = ledger.group_s(float(now))
