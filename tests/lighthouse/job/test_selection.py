"""Which of the candidates a quorum takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.lineage import choose, size_for
from tests.lighthouse.builders import group


@pytest.mark.parametrize(
    ("candidates", "allowed", "active", "size"),
    [
        (0, set(), None, 0),
        (3, set(), None, 3),
        (3, {2, 4, 8}, None, 2),
        (4, {2, 4, 8}, None, 4),
        (100, {2, 4, 8}, None, 8),
        (1, {2, 4, 8}, None, 0),
        (5, set(), 4, 4),
        (3, set(), 4, 3),
        (5, {2, 4, 8}, 3, 2),
        (5, {4}, 3, 0),
    ],
)
def test_size_for(candidates: int, allowed: set[int], active: int | None, size: int):
    assert size_for(candidates, allowed, active) == size


def names(chosen: list) -> str:
    return "".join(p.replica_id for p in chosen)


def test_a_member_of_another_history_is_not_at_their_head():
    """It is to heal, however high its step: a quorum of the foreign alone would end the running job's history."""
    members = [group("a", 9), group("b", 5), group("c", 4)]
    assert names(choose(members, set("abc"), 1, foreign={"a"})) == "b"
    assert names(choose(members, set("abc"), 2, foreign={"a", "b"})) == "ca"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3)), unique_by=lambda c: c[0]), st.data())
def test_never_a_newcomer_before_a_member(drawn: list[tuple[str, int]], data: st.DataObject):
    candidates = [group(name, step) for name, step in drawn]
    previous = data.draw(st.sets(st.sampled_from("abcdefgh")))
    size = data.draw(st.integers(0, len(candidates)))
    chosen, left = choose(candidates, previous, size), []
    assert len(chosen) == size
    assert all(c in candidates for c in chosen)
    left = [c for c in candidates if c not in chosen]
    if any(c.replica_id in previous for c in left):
        assert all(c.replica_id in previous for c in chosen)
    newcomers = [c for c in candidates if c.replica_id not in previous]
    taken = [c for c in newcomers if c in chosen]
    assert taken == newcomers[: len(taken)]
    members = [c.step for c in candidates if c.replica_id in previous]
    if size and members:
        assert max(members) in [c.step for c in chosen]
