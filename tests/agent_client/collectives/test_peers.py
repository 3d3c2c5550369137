"""The peers of a quorum are met anew for each, and given up at any moment, also while they still meet."""

import contextlib
import time
from collections.abc import Callable

import pytest

from tests.agent_client.collectives.groups import ENDS_WITHIN_S
from tests.agent_client.ranks import Rank, RankError, Start, together
from tests.processes import eventually

Peers = Callable[..., list[Rank]]


@pytest.fixture
def peers(start: Start) -> Peers:
    def build(count: int, connect_timeout_s: float = 60.0) -> list[Rank]:
        ranks = start(count, "tests.agent_client.actors:PeersActor")
        for rank in ranks:
            rank.call("build", connect_timeout_s)
        return ranks

    return build


def meet(store: str, quorum_id: int, *ranks: Rank) -> None:
    places = enumerate(ranks)
    pending = [rank.begin("configure", store, quorum_id, place, len(ranks)) for place, rank in places]
    for each in pending:
        each.result()


def wait_meeting(rank: Rank) -> None:
    """In the midst of it, for all that a test can know."""
    eventually(lambda: rank.call("is_meeting"), "it meets its peers")
    time.sleep(0.2)


def sums(*ranks: Rank) -> list[float]:
    return together(ranks, "all_reduce")


def test_quorum_after_quorum(store: str, peers: Peers) -> None:
    a, b, c = peers(3)
    meet(store, 1, a, b)
    assert sums(a, b) == [2, 2]
    meet(store, 2, a, b, c)
    assert sums(a, b, c) == [3, 3, 3]
    meet(store, 2, a, b, c)  # nothing new
    meet(store, 3, c)
    assert sums(c) == [1]


def test_each_learns_what_all_say(store: str, peers: Peers) -> None:
    a, b, c = peers(3)
    meet(store, 5, a, b, c)
    told = [(1, -(2**63)), (2, 2**63 - 1), (0, 3)]
    exchanged = [rank.begin("exchange", *words) for rank, words in zip((a, b, c), told, strict=True)]
    assert [each.result() for each in exchanged] == [told] * 3
    assert sums(a, b, c) == [3, 3, 3]
    meet(store, 6, c)
    assert c.call("exchange", 7) == [(7,)]
    c.call("drop")
    with pytest.raises(RankError, match="was abandoned"):
        c.call("exchange", 7)


@pytest.mark.parametrize(("quorum_id", "revoked"), [(10, 10), (12, None)])
def test_a_meeting_to_which_a_peer_does_not_come_ends_with_the_revoke(
    store: str, peers: Peers, quorum_id: int, revoked: int | None
) -> None:
    a, b = peers(2)
    meeting = a.begin("configure", store, quorum_id, 0, 2)
    wait_meeting(a)
    a.call("revoke", revoked)
    with pytest.raises(RankError, match=f"quorum {quorum_id} was revoked: a test says so"):
        meeting.result(ENDS_WITHIN_S)
    with pytest.raises(RankError, match=f"quorum {quorum_id} was revoked: a test says so"):
        a.call("all_reduce")
    meet(store, quorum_id + 1, a, b)
    assert sums(a, b) == [2, 2]


def test_one_that_stops_while_they_meet_holds_nobody(store: str, peers: Peers) -> None:
    a, b, c = peers(3)
    c.begin("configure", store, 20, 2, 3)
    wait_meeting(c)
    c.stop()
    meetings = [rank.begin("configure", store, 20, place, 3) for place, rank in enumerate((a, b))]
    for rank, meeting in zip((a, b), meetings, strict=True):
        eventually(lambda rank=rank: rank.call("quorum") == 20, "it has begun to meet its peers")
        rank.call("revoke", 20)
        with contextlib.suppress(RankError):  # whether gloo waits for the stopped one is a matter of its port
            meeting.result(ENDS_WITHIN_S)
        with pytest.raises(RankError, match="quorum 20 was revoked"):
            rank.begin("all_reduce").result(ENDS_WITHIN_S)
    meet(store, 21, a, b)
    assert sums(a, b) == [2, 2]


def test_a_quorum_that_was_revoked_before_it_was_met_is_not_met(store: str, peers: Peers) -> None:
    [a] = peers(1)
    a.call("was_revoked", 25)
    with pytest.raises(RankError, match="quorum 25 was revoked: it was told before"):
        a.begin("configure", store, 25, 0, 2).result(ENDS_WITHIN_S)


def test_a_quorum_that_was_given_up_is_not_met_again(store: str, peers: Peers) -> None:
    a, b = peers(2)
    meet(store, 27, a, b)
    a.call("drop")
    with pytest.raises(RankError, match="the process group of quorum 27 was abandoned"):
        a.begin("configure", store, 27, 0, 2).result(ENDS_WITHIN_S)
    meet(store, 28, a, b)
    assert sums(a, b) == [2, 2]


def test_a_peer_that_never_comes_is_not_waited_for_longer_than_its_time(store: str, peers: Peers) -> None:
    [rank] = peers(1, connect_timeout_s=0.5)
    with pytest.raises(RankError, match=r"(did not connect within 1.5 s|[Tt]imeout|[Tt]imed out)"):
        rank.begin("configure", store, 29, 0, 2).result(ENDS_WITHIN_S)


def test_the_revoke_of_another_quorum_ends_nothing(store: str, peers: Peers) -> None:
    a, b = peers(2)
    meeting = a.begin("configure", store, 30, 0, 2)
    a.call("revoke", 29)
    b.call("configure", store, 30, 1, 2)
    meeting.result()
    assert sums(a, b) == [2, 2]


def test_a_late_comer_to_a_meeting_that_was_given_up_is_left_alone(store: str, peers: Peers) -> None:
    """And what the abandoned thread still makes is ended by it."""
    a, b = peers(2)
    meeting = a.begin("configure", store, 40, 0, 2)
    wait_meeting(a)
    a.call("drop")
    with pytest.raises(RankError, match="was abandoned"):
        meeting.result(ENDS_WITHIN_S)
    b.begin("configure", store, 40, 1, 2).is_done(within_s=ENDS_WITHIN_S)
    with pytest.raises(RankError):
        b.begin("all_reduce").result(ENDS_WITHIN_S)
