"""Whoever holds the former quorum and is told the change has the next one; otherwise nobody has a wrong one."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import Participant, Quorum, QuorumChange
from lighthouse_protocol.messages.session import QuorumChanged
from lighthouse_protocol.rules.quorum_change import NamedQuorum, apply_change, change_between
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
from tests.lighthouse_protocol.builders import native_participants, torchft_members
from tests.lighthouse_protocol.drawn import messages

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
