"""What a manager counts of its steps: each number only grows, and says why a step was discarded."""

from dataclasses import replace

import pytest

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts
from manager.group import events
from manager.group.counts import StepCounts
from manager.group.machine import GroupMachine
from manager.group.records import ReplicaGroup
from tests.manager.groups import echo, holding, order, told, vote


@pytest.fixture
def counts() -> StepCounts:
    return StepCounts(ReplicaGroup(Participant("a", group_world_size=2)))


def counts_of(machine: GroupMachine) -> GroupCounts:
    """With what is settled by the next step."""
    machine.counts.begin_step(99.0, has_healing=False)
    assert machine.group_report().counts is not None
    return machine.group_report().counts


def test_the_time_of_a_step_runs_from_when_its_ranks_are_let_in_until_it_is_committed(counts: StepCounts):
    counts.begin_step(10.0, has_healing=False)
    counts.count_step(12.5)
    assert counts.totals == GroupCounts(commits=1, step_s=2.5)


def test_a_discarded_step_has_a_time_of_its_own_and_one_in_which_a_group_heals_has_none(counts: StepCounts):
    counts.begin_step(0.0, has_healing=False)
    counts.count_discard(1, 3.0, is_rank_lost=False)
    counts.count_step(4.0)  # a step that was opened by a vote: nobody was let in
    counts.begin_step(5.0, has_healing=True)
    counts.count_step(9.0)
    counts.count_step(20.0)
    counts.begin_step(21.0, has_healing=True)
    counts.count_discard(2, 22.0, is_rank_lost=False)
    counts.count_step(23.0)
    totals = counts.totals
    assert (totals.step_s, totals.discarded_s, totals.commits, counts.discards) == (0.0, 3.0, 4, 2)


def test_a_discard_has_one_reason(counts: StepCounts):
    counts.count_discard(1, 3.0, is_rank_lost=False)
    counts.record_revoke(1, is_group_lost=False)  # by what the lighthouse makes of it
    counts.record_revoke(2, is_group_lost=False)
    counts.count_discard(2, 3.0, is_rank_lost=False)
    counts.record_revoke(3, is_group_lost=True)
    counts.record_revoke(3, is_group_lost=False)  # told again
    counts.count_discard(3, 3.0, is_rank_lost=False)
    counts.count_discard(3, 3.0, is_rank_lost=True)
    assert counts.discards == 4
    counts.begin_step(9.0, has_healing=False)
    assert counts.totals.discards == Discards(group_lost=1, rank_lost=1, revoked=1, voted_no=1)
    assert counts.discards == 4


def test_ranks_may_notice_the_loss_of_a_group_before_the_lighthouse_does(counts: StepCounts):
    counts.count_discard(7, 3.0, is_rank_lost=False)
    assert counts.totals.discards == Discards()
    counts.record_revoke(7, is_group_lost=True)
    counts.begin_step(1.0, has_healing=False)
    assert counts.totals.discards == Discards(group_lost=1)


def test_a_heal_of_all_ranks_counts_once_and_their_bytes_add_up(counts: StepCounts):
    counts.record_heals(0, "p0", HealTotals(1, 2.0, 100))
    counts.record_heals(1, "p1", HealTotals(1, 3.0, 50))
    assert counts.totals.healed == HealTotals(1, 3.0, 150)


def test_the_heals_of_a_process_that_has_ended_are_kept(counts: StepCounts):
    counts.record_heals(0, "p0", HealTotals(2, 4.0, 100))
    counts.record_heals(0, "p1", HealTotals(1, 1.0, 50))
    counts.record_heals(0, "p1", HealTotals(0, 0.0, 0))  # an old sample
    assert counts.totals.healed == HealTotals(3, 5.0, 150)


def test_what_is_told_is_made_anew_only_when_a_number_changes(counts: StepCounts):
    assert counts.totals is counts.totals
    before = counts.totals
    counts.count_step(1.0)
    assert before == GroupCounts() != counts.totals


# What a machine tells the lighthouse.


def test_commits_and_their_time_with_the_grant_in_the_decision():
    m = holding()
    for rank in range(2):
        m.handle(vote(10 + rank, rank, 0, wants=True), 0.5)
    for rank in range(2):
        m.handle(vote(20 + rank, rank, 1, wants=True), 2.0)
    assert counts_of(m) == GroupCounts(commits=2, step_s=1.5)  # in the first step a group takes the other's state


NO = vote(10, 0, 0, yes=False)
LOST = replace(order("revoked"), lost="b: rank 1 has ended")


@pytest.mark.parametrize(
    ("happened", "counted"),
    [
        pytest.param([NO], Discards(voted_no=1), id="a no"),
        pytest.param([events.WatchEnded(1), vote(11, 1, 0, yes=False)], Discards(rank_lost=1), id="a lost rank"),
        pytest.param([told(order("revoked", reason="b has discarded")), NO], Discards(revoked=1), id="a revoke"),
        pytest.param([echo(2, LOST), NO], Discards(group_lost=1), id="a lost group, by the answer to a heartbeat"),
    ],
)
def test_why_a_step_was_discarded(happened: list[events.Event], counted: Discards):
    m = holding()
    for event in happened:
        m.handle(event, 0.5)
    assert counts_of(m).discards == counted


def test_a_heal():
    m = holding()
    m.handle(events.RankHealed(1, "w1", HealTotals(1, 2.0, 7)), 0.2)
    assert counts_of(m).healed == HealTotals(1, 2.0, 7)
