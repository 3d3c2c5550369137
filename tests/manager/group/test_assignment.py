"""Heal assignment: by example, and against the dumb version."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from manager.group.requests import assign, is_for_one_step
from tests.manager.builders import member, quorum
from tests.manager.plain_assignment import plan


def test_the_whole_answer_of_one_that_heals():
    q = quorum(member("a", 7), member("b", 7), member("c", 3), member("d", 5))
    answer = assign(q, "c", 1, init_sync=True)
    assert answer == Assignment(
        quorum_id=1,
        replica_rank=2,
        replica_world_size=4,
        replica_ids=("a", "b", "c", "d"),
        store_address="b:2",
        max_step=7,
        max_rank=None,
        max_world_size=2,
        contributors=2,
        primary_address="b:1",
        heal_from_rank=1,
        heal_from_address="b:1",
        other_sources=("a:1",),
        healing=(2, 3),
    )
    assert answer.heals


def test_of_a_job_s_first_quorum_it_costs_no_square_of_the_participants():
    """All but one are behind. With eight times as many it is eight times as much; a square would be 64 times."""

    def cpu_s(groups: int) -> float:
        q = quorum(*(member(f"g{n}", 0) for n in range(groups)))
        took = list[float]()
        for _ in range(5):
            began_at = time.process_time()
            assert assign(q, "g7", 0, init_sync=True, stands=True)
            took.append(time.process_time() - began_at)
        return min(took)

    assert cpu_s(8_000) < 24 * cpu_s(1_000)


@pytest.mark.parametrize(
    ("said", "places", "heals"),
    [
        ((False, True, True), (0, 1, 2), True),
        ((None, False, True), (0, 1, None), True),
        ((False, False, False), (0, 1, None), False),
    ],
    ids=["it counts", "beside one that does not say it, as torchft", "it is told too late, and dealt no source"],
)
def test_one_that_heals_first_counts_in_that_step(
    said: tuple[bool | None, ...], places: tuple[int | None, ...], heals: bool
):
    q = quorum(*(member(name, step, heals_first=it) for name, step, it in zip("abc", (7, 7, 3), said, strict=True)))
    answers = [assign(q, name, 0, init_sync=True, stands=True) for name in "abc"]
    assert tuple(answer.place for answer in answers) == places
    assert [answer.heals for answer in answers] == [False, False, heals]
    assert [answer.has_healing for answer in answers] == [heals] * 3


def test_is_known_by_the_id_that_it_writes():
    uuid = "11111111-2222-3333-4444-555555555555"
    q = quorum(member("a", incarnation=uuid, wire_id=f"a:{uuid}"))
    assert assign(q, f"a:{uuid}", 0, init_sync=True).replica_ids == (f"a:{uuid}",)
    assert assign(q, "a", 0, init_sync=True) is None


def quorums_at(steps: st.SearchStrategy[int]) -> st.SearchStrategy[Quorum]:
    members = st.builds(
        member,
        st.text("abcd", min_size=1, max_size=3),
        steps,
        commit_failures=st.integers(0, 2),
        catch_up=st.booleans(),
        has_source=st.booleans(),
        compares=st.sampled_from([True, True, True, False]),
        heals_first=st.sampled_from([False, True, True, True, None]),
        ranks_disagree=st.sampled_from([False, False, False, True]),
    )
    drawn = st.lists(members, min_size=1, max_size=8, unique_by=lambda p: p.wire_id)
    return drawn.map(lambda those: Quorum(4, tuple(sorted(those, key=lambda p: p.wire_id))))


quorums = quorums_at(st.sampled_from([0, 0, 1, 2, 5])) | quorums_at(st.just(0))


def tagged(q: Quorum) -> Quorum:
    """The same, of Agents."""
    tags = (None if p.ranks_disagree else p.step and 3 for p in q.participants)
    return Quorum(
        q.quorum_id, tuple(replace(p, tag_quorum_id=tag) for p, tag in zip(q.participants, tags, strict=True))
    )


@settings(max_examples=300)
@given(quorums, st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_like_the_dumb_version(q: Quorum, group_rank: int, init_sync: bool, all_tagged: bool, stands: bool):
    q = tagged(q) if all_tagged else q
    expected = plan(q, group_rank, init_sync, stands)
    for place, participant in enumerate(q.participants):
        answer = assign(q, participant.wire_id, group_rank, init_sync, stands=stands)
        source = expected.takes_from.get(participant.wire_id)
        assert answer == Assignment(
            quorum_id=4,
            replica_rank=place,
            replica_world_size=len(q.participants),
            replica_ids=tuple(p.wire_id for p in expected.members),
            store_address=expected.primary.store_address,
            max_step=expected.max_step,
            max_rank=expected.at_max.index(participant) if participant in expected.at_max else None,
            max_world_size=len(expected.at_max),
            contributors=len(expected.contributors),
            primary_address=expected.primary.address,
            heal_from_rank=q.participants.index(source) if source else None,
            heal_from_address=source.address if source else "",
            serve_to=tuple(
                i
                for i, other in enumerate(q.participants)
                if expected.takes_from.get(other.wire_id, other) is participant and other is not participant
            ),
            commit_failures=max(p.commit_failures for p in q.participants),
            other_sources=stand_ins(expected.up_to_date, source),
            catching_up=tuple(i for i, p in enumerate(q.participants) if p in expected.catching_up),
            tag_quorum_id=expected.at_max[0].tag_quorum_id,
            compares=expected.compares,
            place=expected.contributors.index(participant.wire_id)
            if participant.wire_id in expected.contributors
            else None,
            healing=tuple(i for i, p in enumerate(q.participants) if p in expected.healing),
        )


def stand_ins(sources: list[Participant], first: Participant | None) -> tuple[str, ...]:
    """The four that follow `first` in the round."""
    if first is None:
        return ()
    at = sources.index(first)
    return tuple(source.address for source in (sources[at + 1 :] + sources[:at])[:4])


@settings(max_examples=200)
@given(quorums, st.integers(1, 3), st.booleans(), st.booleans())
def test_a_quorum_is_for_one_step_where_any_rank_of_a_group_adds_zeros_and_has_no_source(
    q: Quorum, size: int, init_sync: bool, all_tagged: bool
):
    q = tagged(q) if all_tagged else q
    answers = [
        assign(q, p.wire_id, group_rank, init_sync, stands=True) for p in q.participants for group_rank in range(size)
    ]
    late = [a for a in answers if a is not None and a.place is None and not (a.heals or a.catches_up)]
    assert is_for_one_step(q, init_sync, size) == bool(late)


@given(quorums, st.integers(0, 3))
def test_nothing_but_steps_and_ids_decides(q: Quorum, group_rank: int):
    """torchft's managers see less of a participant than ours: they must come to the same answer. One is theirs."""
    theirs = replace(q.participants[0], heals_first=None, ranks_disagree=False)
    q = Quorum(4, (theirs, *q.participants[1:]))
    poor = Quorum(4, tuple(Participant(p.wire_id, step=p.step, address=p.address) for p in q.participants))
    for p in q.participants:
        rich, less = (assign(which, p.wire_id, group_rank, init_sync=True) for which in (q, poor))
        beside = {"store_address": "", "commit_failures": 0, "compares": False}
        assert replace(rich, **beside) == replace(less, **beside)
