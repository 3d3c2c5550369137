"""A gloo group among real processes: given up in milliseconds while a peer is stopped or dead, and made anew."""

import time

import pytest

from examples.ports import free_port
from tests.agent_client.collectives.groups import (
    ENDS_WITHIN_S,
    check_abort_ends,
    check_leaves_nothing,
    check_sums,
    key,
    meet,
    reconfigure,
    wait_in_all_reduce,
)
from tests.agent_client.ranks import RankError, Start, together
from tests.processes import LOCALHOST, eventually

ACTOR = "tests.agent_client.actors:GlooActor"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_the_same_bits_in_all_ranks(store: str, start: Start, size: int) -> None:
    ranks = start(size, ACTOR)
    meet(store, ranks)
    for length in (1, 3, 1000, 100_003, 100_003):
        check_sums(ranks, length)


@pytest.mark.parametrize("size", [3, 5])
def test_abort_ends_the_wait_of_the_survivors_of_a_stopped_peer(store: str, start: Start, size: int) -> None:
    *survivors, stopped = start(size, ACTOR)
    meet(store, [*survivors, stopped])
    stopped.stop()
    check_abort_ends(survivors, wait_in_all_reduce(survivors))
    meet(store, survivors)
    check_sums(survivors)


@pytest.mark.parametrize("leaver_is_killed", [True, False], ids=["killed", "aborts"])
@pytest.mark.parametrize("size", [2, 6])
def test_one_that_leaves_ends_the_wait_of_all_who_leave_in_turn(
    store: str, start: Start, size: int, leaver_is_killed: bool
) -> None:
    """Neighbours learn it first; each abort passes it on, so that all are out and nobody waits for a timeout."""
    *others, leaver = start(size, ACTOR)
    meet(store, [*others, leaver])
    waiting = dict(zip(others, wait_in_all_reduce(others), strict=True))
    leaver.kill() if leaver_is_killed else leaver.call("abort")
    while waiting:
        learned = eventually(lambda: [rank for rank in waiting if waiting[rank].is_done()], within_s=ENDS_WITHIN_S)
        for rank in learned:
            error, _ = waiting.pop(rank).result()
            assert error
            rank.call("abort")
    if len(others) > 1:
        meet(store, others)
        check_sums(others)


def test_a_peer_that_goes_on_after_a_stop_learns_that_its_group_is_over(store: str, start: Start) -> None:
    survivor, stopped = start(2, ACTOR)
    meet(store, [survivor, stopped])
    stopped.stop()
    [waiting] = wait_in_all_reduce([survivor])
    survivor.call("abort")
    assert waiting.result(ENDS_WITHIN_S)[0]
    stopped.resume()
    error, _ = stopped.call("wait_in_all_reduce", within_s=30.0)
    assert error
    meet(store, [survivor, stopped])
    check_sums([survivor, stopped])


def test_a_peer_that_does_not_come_fails_the_meeting_in_time(store: str, start: Start) -> None:
    ranks = start(2, ACTOR)
    name, began_at = key(), time.monotonic()
    meetings = [rank.begin("meet", store, name, place, 3, connect_timeout_s=1.0) for place, rank in enumerate(ranks)]
    for meeting in meetings:
        with pytest.raises(RankError) as refused:
            meeting.result(30.0)
        assert refused.value.kind in ("RuntimeError", "DistStoreError", "DistNetworkError")
    assert 0.9 < time.monotonic() - began_at < 10.0
    meet(store, ranks)
    check_sums(ranks)


def test_no_store_is_an_error_that_names_its_address(start: Start) -> None:
    [rank] = start(1, ACTOR)
    address = f"{LOCALHOST}:{free_port()}"
    with pytest.raises(RankError, match=f"no TCPStore answers at {address}"):
        rank.call("connect", address, 1.0, within_s=30.0)
    with pytest.raises(RankError, match=r"'somewhere' has no port.*--store"):
        rank.call("connect", "somewhere", 1.0)


def test_a_collective_past_its_timeout_fails(store: str, start: Start) -> None:
    survivor, stopped = start(2, ACTOR)
    meet(store, [survivor, stopped], timeout_s=1.0)
    stopped.stop()
    error, _ = survivor.call("wait_in_all_reduce", within_s=30.0)
    assert error


def test_a_collective_may_take_longer_than_connecting(store: str, start: Start) -> None:
    """A peer that heals may come minutes after the others."""
    early, late = start(2, ACTOR)
    meet(store, [early, late], connect_timeout_s=2.0)
    waiting = early.begin("all_reduce", 0, 1000)
    time.sleep(3.0)
    assert late.call("all_reduce", 1, 1000) == waiting.result()


def test_an_abort_leaves_all_other_sockets_alone(store: str, start: Start) -> None:
    ranks = start(2, ACTOR)
    for rank in ranks:
        rank.call("socket_inodes")
    meet(store, ranks)
    check_sums(ranks)
    for rank in ranks:
        rank.call("abort")
        rank.call("abort")
        assert rank.call("use_sockets") == b"old new"
        rank.call("drop")
        assert rank.call("use_sockets") == b"old new"


def test_a_connection_of_another_thread_that_opens_meanwhile_survives(store: str, start: Start) -> None:
    """The script's own connections, and the Agent's, come and go while a group waits for a late peer."""
    early, late = start(2, ACTOR)
    name = key()
    meeting = early.begin("meet", store, name, 0, 2)
    eventually(lambda: early.call("is_connecting"), "it waits for its peer")
    early.call("socket_inodes")
    late.call("meet", store, name, 1, 2)
    meeting.result()
    check_sums([early, late])
    early.call("abort")
    assert early.call("use_sockets") == b"old new"


@pytest.mark.parametrize("waits_in", [0, 1])
def test_an_abort_ends_every_group_that_was_made_for_torch(store: str, start: Start, waits_in: int) -> None:
    """A script may wrap two models, each with a group of its own."""
    survivor, stopped = start(2, ACTOR)
    meet(store, [survivor, stopped])
    together((survivor, stopped), "meet_for_torch", "first", "second")
    assert together((survivor, stopped), "sum_for_torch") == [[2.0, 2.0]] * 2
    stopped.stop()
    [waiting] = wait_in_all_reduce([survivor], waits_in)
    survivor.call("abort")
    error, _ = waiting.result(ENDS_WITHIN_S)
    assert error


def test_reconfigurations_leak_no_descriptor_and_no_thread(store: str, start: Start) -> None:
    ranks = start(2, ACTOR)
    check_leaves_nothing(ranks, lambda count: reconfigure(store, ranks, count), times=30)


def test_failed_meetings_leak_no_descriptor_and_no_thread(store: str, start: Start) -> None:
    [rank] = start(1, ACTOR)

    def fail(count: int) -> None:
        for _ in range(count):
            with pytest.raises(RankError):
                rank.call("meet", store, key(), 0, 2, connect_timeout_s=0.1)
            rank.call("drop")

    check_leaves_nothing([rank], fail, times=5)
