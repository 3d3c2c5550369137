"""The assignment of ranks, as a function: its promises for drawn members."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse.job.generations import assign
from lighthouse.job.records import Rank
from lighthouse_protocol.messages.run import RankId, RunTerms

WORLD = 10


@st.composite
def members(draw: st.DrawFn) -> list[Rank]:
    slots = draw(st.lists(st.integers(0, WORLD - 1), unique=True))
    return [
        Rank(
            RankId(slot, draw(st.sampled_from("ab"))),
            seen_at=0.0,
            lapses_at=0.0,
            host=f"node{slot // 3}",
            waits_since=draw(st.sampled_from([None, 0.0, 0.0, 1.0, 1.0, 2.0])),
        )
        for slot in slots
    ]


def terms(hosts_together: bool) -> st.SearchStrategy[RunTerms]:
    return st.builds(
        RunTerms,
        world_size=st.just(WORLD),
        active=st.none() | st.integers(1, WORLD),
        min_active=st.integers(1, 4),
        divisible_by=st.sampled_from([1, 1, 2, 4]),
        hosts_together=st.just(hosts_together),
    )


previous_slots = st.lists(st.integers(0, WORLD - 1), unique=True, max_size=8)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(members(), previous_slots, terms(False) | terms(True))
def test_sizes(members: list[Rank], previous: list[int], terms: RunTerms):
    active = assign(members, previous, terms)
    ready = {member.rank for member in members if member.is_ready}
    assert set(active) <= ready
    assert len(set(active)) == len(active) <= terms.target
    assert len(active) % terms.divisible_by == 0
    assert not active or len(active) >= terms.min_active
    if not terms.hosts_together:
        most = min(len(ready), terms.target) // terms.divisible_by * terms.divisible_by
        assert len(active) == (most if most >= terms.min_active else 0)


@unhurried
@given(members(), previous_slots, terms(False))
def test_who_was_active_stays_and_keeps_its_rank(members: list[Rank], previous: list[int], terms: RunTerms):
    active = assign(members, previous, terms)
    slots = [rank.slot for rank in active]
    ready = {member.rank.slot for member in members if member.is_ready}
    veterans = [slot for slot in previous if slot in ready]
    for place, slot in enumerate(previous):
        if slot in ready and place < len(active):
            assert slots[place] == slot
    if len(veterans) <= len(active):
        assert set(veterans) <= set(slots)
    else:
        assert set(slots) <= set(veterans)


@unhurried
@given(members(), previous_slots.map(lambda slots: slots or [0]), terms(False))
def test_no_chosen_spare_waits_shorter_than_one_left_out(members: list[Rank], previous: list[int], terms: RunTerms):
    active = set(assign(members, previous, terms))
    spares = [member for member in members if member.is_ready and member.rank.slot not in previous]
    chosen = [member.waits_since or 0.0 for member in spares if member.rank in active]
    left_out = [member.waits_since or 0.0 for member in spares if member.rank not in active]
    assert max(chosen, default=0.0) <= min(left_out, default=9.0)


@unhurried
@given(members(), previous_slots, terms(True))
def test_no_host_is_torn(members: list[Rank], previous: list[int], terms: RunTerms):
    active = set(assign(members, previous, terms))
    torn = {member.host for member in members if not member.is_ready}
    assert not {member.host for member in members if member.rank in active} & torn


@unhurried
@given(members(), previous_slots, terms(False) | terms(True))
def test_nothing_changes_without_a_change(members: list[Rank], previous: list[int], terms: RunTerms):
    active = assign(members, previous, terms)
    assert assign(members, [rank.slot for rank in active], terms) == active
