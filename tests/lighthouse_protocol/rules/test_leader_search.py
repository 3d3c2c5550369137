"""Which lighthouse is asked next."""

from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import NotLeader, Unreachable

A, B, C, D = (Address(name, 1) for name in "abcd")
GONE = Unreachable("gone")


def names(leader: Address | str = "") -> NotLeader:
    return NotLeader("follows", leader=str(leader))


def test_a_list_is_gone_through_before_anything_is_waited_for() -> None:
    search = LeaderSearch((A, B, C))
    asked = []
    for _ in range(6):
        asked.append(search.address)
        asked.append("wait" if search.mark_failed(GONE) else "at once")
    assert asked == [A, "at once", B, "at once", C, "wait"] * 2


def test_one_alone_is_waited_for() -> None:
    search = LeaderSearch((A,))
    assert search.mark_failed(GONE)
    assert search.address == A
    assert not search.has_choice
    search.mark_failed(names(A))
    assert search.has_choice, "behind the one name are several"


def test_the_leader_that_is_named_is_asked_at_once_also_where_it_is_not_in_the_list() -> None:
    search = LeaderSearch((A, B, C))
    assert not search.mark_failed(names(C))
    assert search.address == C
    search.mark_served()
    assert not search.mark_failed(names(D))
    assert search.address == D
    search.mark_served()
    assert search.address == D


def test_a_name_that_leads_nowhere_is_followed_once_in_a_round() -> None:
    """Two followers that name each other: an old leader's name outlives it for a moment."""
    search = LeaderSearch((A, B))
    assert not search.mark_failed(names(B))
    assert search.address == B
    assert search.mark_failed(names(A)), "both were asked; now it waits"


def test_a_named_leader_that_serves_and_fails_leaves_the_rest_of_the_list_its_turn() -> None:
    """A names it again and again, as etcd does until the lease of a leader in trouble ends."""
    for named in (C, D):
        search = LeaderSearch((A, B, C))
        for _ in range(3):
            assert search.address == A
            assert not search.mark_failed(names(named))
            assert search.address == named
            search.mark_served()
            assert not search.mark_failed(GONE)
            assert search.address == B
            search.mark_failed(GONE)
            while search.address != A:
                search.mark_failed(GONE)


def test_what_is_no_address_and_its_own_name_are_not_followed() -> None:
    for name in ("", "?", "x:0", str(A)):
        search = LeaderSearch((A, B))
        assert not search.mark_failed(names(name))
        assert search.address == B


ERRORS = st.sampled_from([GONE, names(), names(A), names(B), names(C), names(D)])


@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), ERRORS), min_size=40, max_size=40))
def test_whatever_it_is_told_it_waits_again_and_again_and_asks_them_all(
    size: int, calls: list[tuple[bool, Unreachable]]
) -> None:
    """A lighthouse may also serve before it is gone."""
    addresses = (A, B, C)[:size]
    search = LeaderSearch(addresses)
    asked, since = set[Address](), 0
    for is_served, error in calls:
        asked.add(search.address)
        if is_served:
            search.mark_served()
            since = 0
        since += 1
        if search.mark_failed(GONE if is_served else error):
            since = 0
        assert since <= size + 1
    assert asked >= set(addresses)


def test_one_that_has_just_failed_is_not_called_first_after_the_pause() -> None:
    """A named B, which then served for hours; the client may not have been told so."""
    search = LeaderSearch((A, B))
    assert not search.mark_failed(names(B))
    assert search.mark_failed(GONE)
    assert search.address == A
