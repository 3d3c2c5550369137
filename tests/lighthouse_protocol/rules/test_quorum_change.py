"""A quorum told as a change, and a wait for a quorum in words."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import Participant, Quorum, QuorumChange
from lighthouse_protocol.messages.progress import OpenPhase, RankName
from lighthouse_protocol.messages.session import QuorumChanged
from lighthouse_protocol.rules.quorum_change import (
    CHANGED_AFTER_S,
    CHECKED_EVERY_S,
    LOGGED_AFTER_S,
    MAX_LISTED,
    REPEATED_AFTER_S,
    RETRIED_WITHIN_S,
    NamedQuorum,
    QuorumWait,
    apply_change,
    change_between,
    describe_missing_ranks,
    describe_place,
    list_rank_views,
)
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
from tests.lighthouse_protocol.builders import native_participants, torchft_members
from tests.lighthouse_protocol.drawn import messages
from tests.lighthouse_protocol.views import rank

few = settings(deadline=None, max_examples=50)


def group(name: str, step: int = 7, **fields: object) -> Participant:
    return Participant(name, "i1", address=f"{name}:29512", step=step, **fields)  # pyright: ignore[reportArgumentType]


def quorum(quorum_id: int, *participants: Participant) -> NamedQuorum:
    return NamedQuorum.of(Quorum(quorum_id, participants))


def as_bytes(change: QuorumChange) -> bytes:
    return SESSION_RESPONSES.write(QuorumChanged(1, change, True, "x" * 32)).SerializeToString()


def over_the_wire(change: QuorumChange) -> QuorumChange:
    message = SESSION_RESPONSES.schema.FromString(as_bytes(change))
    told = SESSION_RESPONSES.read(message)
    assert isinstance(told, QuorumChanged)
    return told.change


def test_what_all_have_done_is_told_once():
    """One that joins, one that has gone, one that has failed and one that is born again, among many that have done a
    step."""
    before = [group(f"g{at:03}") for at in range(100)]
    after = [group(f"g{at:03}", 8, tag_quorum_id=1) for at in range(100)]
    after[5] = replace(after[5], commit_failures=1)
    after[30] = replace(after[30], incarnation="i2")
    new = group("g050a", 0)
    told = (after[5], after[30], new)
    old, made = quorum(1, *before), quorum(2, *after[:20], *after[21:51], new, *after[51:])
    change = change_between(old.quorum, made)
    assert change is not None
    assert (change.gone, change.members) == ((20,), told)
    assert apply_change(old.quorum, over_the_wire(change)) == made
    assert len(as_bytes(change)) < 512


def test_a_group_whose_fields_for_others_have_changed_is_told_whole():
    a, b, other = group("a"), group("b"), group("b", extras=b"handles")
    change = change_between(quorum(1, a, b).quorum, quorum(2, a, other))
    assert change is not None
    assert change.members == (other,)


def test_lists_that_are_not_in_order_or_have_nobody_in_common_have_no_changes():
    a, b = group("a"), group("b")
    assert change_between(quorum(1, b, a).quorum, quorum(2, a, b)) is None
    assert change_between(quorum(1, a, b).quorum, quorum(2, a, a)) is None
    assert change_between(quorum(1, a).quorum, quorum(2, b)) is None


def test_a_change_that_makes_another_quorum_than_it_says_is_not_taken():
    a, b, c = group("a"), group("b"), group("c")
    old = quorum(1, a, b)
    change = change_between(old.quorum, quorum(2, a, c))
    assert change is not None
    assert apply_change(old.quorum, replace(change, gone=())) is None
    assert apply_change(old.quorum, replace(change, quorum_id=3)) is None


def test_every_field_of_a_member_is_in_the_name():
    one = group("a")
    for other in (
        replace(one, extras=b"x"),
        replace(one, step=8),
        replace(one, data="x"),
        replace(one, tag_quorum_id=0),
        replace(one, store_address="b:1"),
    ):
        assert quorum(1, one).digest != quorum(1, other).digest
    assert quorum(1, one).digest != quorum(2, one).digest


@st.composite
def lists(draw: st.DrawFn, of: dict[str, Participant]) -> tuple[Participant, ...]:
    """Some of them, in order; most in one state, others in their own."""
    chosen = draw(st.sets(st.sampled_from(sorted(of)), min_size=1))
    common = {"step": draw(st.integers(0, 9)), "tag_quorum_id": draw(st.none() | st.integers(0, 9))}
    own = {"step": draw(st.integers(0, 9)), "commit_failures": 1}
    states = draw(st.lists(st.sampled_from([common, common, common, own, {}]), min_size=len(of), max_size=len(of)))
    moved = [replace(of[name], **state) for name, state in zip(sorted(chosen), states, strict=False)]
    return tuple(sorted(moved, key=lambda member: member.wire_id))


@st.composite
def two_quorums(draw: st.DrawFn) -> tuple[Quorum, Quorum]:
    members = draw(st.lists(native_participants, min_size=1, max_size=5))
    before = {member.wire_id: member for member in members}
    reborn = {
        name: replace(member, incarnation="again") if draw(st.integers(0, 4)) == 0 else member
        for name, member in before.items()
    }
    return Quorum(draw(st.integers(1, 9)), draw(lists(before))), Quorum(draw(st.integers(1, 9)), draw(lists(reborn)))


@few
@given(two_quorums())
def test_a_change_makes_the_former_into_the_next_order_and_all(quorums: tuple[Quorum, Quorum]):
    old, new = map(NamedQuorum.of, quorums)
    if (change := change_between(old.quorum, new)) is not None:
        assert apply_change(old.quorum, over_the_wire(change)) == new
    else:
        stay = {(m.wire_id, m.incarnation) for m in old.quorum.participants}
        assert not stay & {(m.wire_id, m.incarnation) for m in new.quorum.participants}


@few
@given(two_quorums(), messages(Quorum))
def test_of_any_other_quorum_nothing_else_is_made(quorums: tuple[Quorum, Quorum], other: Quorum):
    old, new = map(NamedQuorum.of, quorums)
    change = change_between(old.quorum, new)
    assert change is None or apply_change(other, change) in (None, new)


@few
@given(st.lists(native_participants, max_size=3), st.lists(torchft_members, max_size=3), st.integers(0, 9))
def test_both_ends_name_a_quorum_alike(native: list[Participant], torchft: list[object], quorum_id: int):
    """As the lighthouse has read its members from either form, and as a manager reads it."""
    joined = [documented.participant_from_native(documented.participant_to_native(member)) for member in native]
    joined += [documented.participant_from_torchft(member) for member in torchft]  # pyright: ignore[reportArgumentType]
    formed = Quorum(quorum_id, tuple(joined))
    told = documented.quorum_from_native(documented.quorum_to_native(formed, 1.0).quorum)
    assert NamedQuorum.of(told).digest == NamedQuorum.of(formed).digest


def begun(at: float = 0.0) -> QuorumWait:
    wait = QuorumWait()
    wait.begin(at)
    return wait


def test_a_round_says_nothing():
    wait = begun()
    assert wait.next_line("b", LOGGED_AFTER_S - 0.01) == ""
    assert wait.finish(LOGGED_AFTER_S - 0.01) == ""
    assert wait.next_line("b", 9) == ""


def test_one_that_lasts_is_said_within_ten_seconds_and_its_end_too():
    assert LOGGED_AFTER_S + CHECKED_EVERY_S <= 10
    wait = begun(100)
    assert wait.next_line("b", 105) == "no quorum for 5 s: waiting for b"
    assert wait.finish(112) == "there is a quorum, after 12 s"
    assert wait.finish(113) == ""


def test_the_same_is_said_every_minute_and_what_is_new_before():
    wait = begun()
    assert wait.next_line("b", LOGGED_AFTER_S)
    said_at = LOGGED_AFTER_S
    assert wait.next_line("c", said_at + CHANGED_AFTER_S - 0.01) == ""
    assert wait.next_line("b", said_at + CHANGED_AFTER_S) == ""
    assert wait.next_line("b", said_at + REPEATED_AFTER_S) == "no quorum for 65 s: waiting for b"
    assert wait.next_line("c", said_at + REPEATED_AFTER_S + CHANGED_AFTER_S) == "no quorum for 75 s: waiting for c"


def test_a_request_that_is_asked_again_goes_on_waiting():
    wait = begun()
    wait.pause(4)
    assert wait.next_line("b", 90) == ""
    wait.begin(4 + RETRIED_WITHIN_S)
    assert wait.next_line("b", 7) == "no quorum for 7 s: waiting for b"
    wait.pause(8)
    wait.pause(60)
    wait.begin(8 + RETRIED_WITHIN_S + 0.01)
    assert wait.next_line("b", 10 + LOGGED_AFTER_S) == "", "another wait"


def test_many_requests_are_one_wait():
    wait = begun(1)
    wait.begin(3)
    assert wait.next_line("b", 1 + LOGGED_AFTER_S) == "no quorum for 5 s: waiting for b"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([("", 0)], "0"),
        ([("", 3), ("", 1), ("", 2)], "1-3"),
        ([("", 0), ("", 2), ("", 3), ("", 9)], "0, 2-3, 9"),
        ([("b", 0), ("a", 0), ("a", 1)], "a/0-1, b/0"),
        ([("a", 0), ("b", 1)], "a/0, b/1"),
    ],
)
def test_listed(names: list[tuple[str, int]], text: str):
    assert list_rank_views([rank(number, group=group) for group, number in names]) == text


def test_long_lists_are_cut():
    text = list_rank_views([rank(number, group=f"g{n:02}") for n in range(20) for number in range(4)])
    assert text.count(",") == MAX_LISTED - 1
    assert text.endswith("g15/0-3 and 16 more")


def test_place_is_the_innermost_phase():
    told = {
        "v": OpenPhase("v"),
        "v 3": OpenPhase("v", 3),
        "v 0/9": OpenPhase("v", 0, 9),
        "v 3/25": OpenPhase("v", 3, 25),
    }
    assert [describe_place(rank(0, "epoch", phase)) for phase in told.values()] == [*told]


def test_a_name_without_group_is_its_number():
    assert (str(RankName("", 3)), str(RankName("a", 3))) == ("3", "a/3")


def test_who_of_a_group_is_here_and_who_is_missing():
    assert describe_missing_ranks("a", 8, {4, 5, 6, 7}) == "a has ranks 0-3 of 8; missing: 4-7"
    assert describe_missing_ranks("a", 8, {0, 2}) == "a has ranks 1, 3-7 of 8; missing: 0, 2"
    assert describe_missing_ranks("b", 2, {0}) == "b has rank 1 of 2; missing: 0"
    assert describe_missing_ranks("b", 2, {0, 1}) == "b has none of 2; missing: 0-1"
    assert describe_missing_ranks("b", 2, ()) == "b has ranks 0-1 of 2"
