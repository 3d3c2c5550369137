"""What neither the scenarios (tests/scenarios) nor the plain reference (test_quorum_properties.py) show of the machine.

Events in, the whole list of effects out.
"""

import pytest

from lighthouse.job.events import Withdrawn
from lighthouse.job.lineage import LEFT_TO_ANOTHER
from lighthouse.job.presence import MAX_REPORTED
from lighthouse.job.records import Kind, Verdict
from lighthouse_protocol.refusals import LimitReached, WrongState
from tests.lighthouse.builders import (
    FAR,
    answers,
    beat,
    beating,
    formed,
    group,
    join,
    machine,
    on_loopback,
    refused,
    ticked,
    training,
)


def test_one_alone_forms_at_once():
    m = machine(first_quorum_id=17)
    assert m.decision.verdict is Verdict.NO_JOINS
    assert m.handle(join(1, "a"), now=1) == [formed(17, (1,), group("a"))]
    assert m.decision.verdict is Verdict.FORMED


def test_participants_are_sorted_by_the_id_that_their_callers_write():
    m = machine()
    names = ["b", "B", "a-1", "a"]
    for name in names:
        m.handle(beat(name), now=0)
    effects = [m.handle(join(call, name), now=0) for call, name in enumerate(names)]
    assert [p.wire_id for p in effects[-1][0].quorum.participants] == ["B", "a", "a-1", "b"]


def test_what_a_member_was_told_to_heal_to_is_known_until_it_comes_with_another_state():
    """It may catch up from there for as long as it takes."""
    m = training("ab")
    for call, step, lowest in ((3, 7, 7), (5, 9, 7)):
        m.handle(join(call, "a", step=3, tag_quorum_id=0), now=call)
        m.handle(join(call + 1, "b", step=step, tag_quorum_id=0), now=call)
        assert m.job.groups.get("a").last_assignment.lowest == lowest
    m.handle(join(7, "a", step=7, tag_quorum_id=1), now=7)
    m.handle(join(8, "b", step=11, tag_quorum_id=1), now=7)
    assert m.job.groups.get("a").last_assignment.lowest == 11


def test_an_answer_is_a_sign_of_life():
    m = machine(heartbeat_timeout_s=5)
    m.handle(beat("b"), now=0)
    m.handle(join(1, "a"), now=0)
    beating(m, "b", 0, 32)
    assert len(m.handle(join(2, "b"), now=32)) == 1
    ticked(m, 32, 36.9)
    assert m.job.groups.get("a").is_alive
    ticked(m, 36.9, 37)
    assert not m.job.groups.get("a").is_alive


@pytest.mark.parametrize("field", ["seen_quorum_id", "tag_quorum_id"])
def test_the_id_is_above_what_any_member_was_ever_told(field: str):
    m = machine(first_quorum_id=5)
    first = 40 + LEFT_TO_ANOTHER
    assert m.handle(join(1, "a", **{field: 40}), now=0)[0].quorum.quorum_id == first
    told = group("a", seen_quorum_id=first)
    assert m.handle(join(2, told), now=1) == [formed(first, (2,), told, is_new=False)]
    assert m.handle(join(3, "a", **{field: 5000}), now=2)[0].quorum.quorum_id == 5000 + LEFT_TO_ANOTHER


def test_a_refused_join_changes_nothing():
    m = training("ab", max_replicas=2)
    before = m.deadline(1), len(m.job.groups), m.decision.verdict
    assert m.handle(join(3, "c"), now=1) == [refused(3, LimitReached, "replica_id", "c", "2", "--max-members")]
    assert (m.deadline(1), len(m.job.groups), m.decision.verdict) == before
    assert m.handle(Withdrawn("c", 3), now=1) == []


def test_heartbeats_of_new_ids_beyond_the_limit_are_not_remembered():
    m = machine(max_replicas=2)
    for n in range(100):
        m.handle(beat(f"g{n}"), now=0)
    assert len(m.job.groups) == 2


def test_heartbeats_of_strangers_keep_no_group_out():
    m = machine(max_replicas=2)
    for n in range(100):
        m.handle(beat(f"g{n}"), now=0)
    for call, name in enumerate("ab", start=1):
        m.handle(join(call, name), now=1)
    assert {m.job.groups.get(name) is not None for name in "ab"} == {True}
    [refusal] = m.handle(join(3, "c"), now=1)
    assert refusal == refused(3, LimitReached, "replica_id", "c", "group number 3", "2", "--max-members")
    assert m.handle(join(4, "g0"), now=1) == [refused(4, LimitReached, "g0")]


def test_so_many_strangers_are_known_at_most():
    m = machine()
    for n in range(MAX_REPORTED + 5):
        m.handle(beat(f"g{n}"), now=0)
    assert len(m.job.groups) == MAX_REPORTED


def test_heartbeats_of_known_ids_count_at_the_limit_too():
    m = machine(max_replicas=2, heartbeat_timeout_s=5)
    for now in range(20):
        for name in "ab":
            m.handle(beat(name), now)
    assert m.job.counts[Kind.HEALTHY] == 2


def test_a_participant_on_a_loopback_is_sent_away_though_no_call_of_it_waits():
    m = machine()
    m.handle(join(1, on_loopback("a")), now=0)
    assert m.handle(join(2, "b"), now=1) == [formed(2, (2,), group("b"))]
    assert m.handle(join(3, on_loopback("a", step=1)), now=2) == [refused(3, WrongState, "a", "b")]


class TestDeadline:
    """The moment when tick is to be called: always after now."""

    def test_the_join_timeout_and_the_cut(self):
        m = training("abc", heartbeat_timeout_s=100)
        m.handle(join(4, "a", deadline_at=FAR), now=1)
        assert m.deadline(1) == 61
        m.handle(join(5, "b", deadline_at=20), now=1)
        assert m.deadline(1) == 19

    def test_no_join_timeout_where_there_is_nobody_to_miss_it(self):
        m = machine(min_replicas=2, heartbeat_timeout_s=100)
        m.handle(join(1, "a", deadline_at=20), now=0)
        assert m.deadline(0) == 100

    def test_a_spare_s_call_cuts_no_member_s_wait(self):
        m = training("abc", heartbeat_timeout_s=100, active=3)
        m.handle(join(4, "d", deadline_at=5), now=1)
        m.handle(join(5, "a", deadline_at=20), now=3)
        m.handle(join(6, "b", deadline_at=20), now=3)
        assert m.deadline(3) == 19
        assert answers(m.handle(join(7, "c"), now=4.5)) == [formed(1, (5, 6, 7), *map(group, "abc"), is_new=False)]

    def test_no_cut_without_a_majority(self):
        m = training("abc", heartbeat_timeout_s=100)
        m.handle(join(4, "a", deadline_at=20), now=1)
        assert m.deadline(1) == 61
