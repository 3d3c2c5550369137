"""A gloo group among real processes: given up in milliseconds while a peer is stopped or dead, and made anew."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from examples.ports import free_port
from tests.agent_client.ranks import Pending, Rank, RankError, RankServer
from tests.processes import LOCALHOST, eventually

ACTOR = "tests.agent_client.actors:GlooActor"
ABORT_WITHIN_S = 5.0
RECONFIGURATIONS = 30

Start = Callable[[int], list[Rank]]


@pytest.fixture
def start(rank_server: RankServer) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(rank_server.start(ACTOR)) for _ in range(count)]


def meet(store: str, ranks: list[Rank], key: str, **options: float) -> None:
    key = f"{key}-{time.monotonic_ns()}"
    meetings = [rank.begin("meet", store, key, place, len(ranks), **options) for place, rank in enumerate(ranks)]
    for meeting in meetings:
        meeting.result()


def sums(ranks: list[Rank], length: int = 1000) -> list[str]:
    pending = [rank.begin("all_reduce", seed, length) for seed, rank in enumerate(ranks)]
    return [each.result() for each in pending]


def all_equal(digests: list[str]) -> bool:
    return len(set(digests)) == 1


def wait_in_all_reduce(ranks: list[Rank], torch_group: int | None = None) -> list[Pending]:
    """All of `ranks` wait in a collective that cannot end, since a peer is missing in it."""
    waiting = [rank.begin("wait_in_all_reduce", torch_group) for rank in ranks]
    for rank in ranks:
        eventually(lambda rank=rank: rank.call("get_is_reducing"), "it reduces")
    assert not waiting[0].is_done(within_s=0.1)
    return waiting


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 1000, 100_003])
def test_a_sum_is_the_same_bits_in_all_ranks(store: str, start: Start, size: int, length: int) -> None:
    ranks = start(size)
    meet(store, ranks, "sum")
    assert all_equal(sums(ranks, length))
    assert all_equal(sums(ranks, length))


def times(ends: list[tuple[str, float]], since: float) -> str:
    return ", ".join(f"{1000 * (ended_at - since):.1f} ms" for _, ended_at in ends)


@pytest.mark.parametrize("size", [3, 5])
def test_abort_ends_the_wait_of_the_survivors_of_a_stopped_peer(store: str, start: Start, size: int) -> None:
    """Each ends its own: a neighbour's end is not seen by who waits for the stopped one."""
    *survivors, stopped = start(size)
    meet(store, [*survivors, stopped], "stopped")
    stopped.stop()
    waiting = wait_in_all_reduce(survivors)
    aborts = [survivor.begin("abort") for survivor in survivors]
    began_at = min(abort.result(ABORT_WITHIN_S)[0] for abort in aborts)
    ends = [each.result(ABORT_WITHIN_S) for each in waiting]
    assert all(error for error, _ in ends)
    print(f"a stopped peer of {size}, after the abort: {times(ends, began_at)}")
    assert max(ended_at for _, ended_at in ends) - began_at < ABORT_WITHIN_S

    meet(store, survivors, "survivors")
    assert all_equal(sums(survivors))


@pytest.mark.parametrize("leaver_is_killed", [True, False], ids=["killed", "aborts"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_one_that_leaves_ends_the_wait_of_all_who_leave_in_turn(
    store: str, start: Start, size: int, leaver_is_killed: bool
) -> None:
    """Neighbours learn it first; each abort passes it on, so that all are out and nobody waits for a timeout."""
    *others, leaver = start(size)
    meet(store, [*others, leaver], "leaver")
    waiting = dict(zip(others, wait_in_all_reduce(others), strict=True))
    left_at = time.monotonic()
    leaver.kill() if leaver_is_killed else leaver.call("abort")
    ends: list[tuple[str, float]] = []
    while waiting:
        learned = eventually(lambda: [rank for rank in waiting if waiting[rank].is_done()], within_s=ABORT_WITHIN_S)
        for rank in learned:
            ends.append(waiting.pop(rank).result())
            rank.call("abort")
    assert all(error for error, _ in ends)
    print(f"one of {size} leaves: {times(ends, left_at)}")
    if len(others) > 1:
        meet(store, others, "the others")
        assert all_equal(sums(others))


def test_a_peer_that_goes_on_after_a_stop_learns_that_its_group_is_over(store: str, start: Start) -> None:
    survivor, stopped = start(2)
    meet(store, [survivor, stopped], "resumed")
    stopped.stop()
    [waiting] = wait_in_all_reduce([survivor])
    survivor.call("abort")
    assert waiting.result(ABORT_WITHIN_S)[0]
    stopped.resume()
    error, _ = stopped.call("wait_in_all_reduce", within_s=30.0)
    assert error
    meet(store, [survivor, stopped], "together again")
    assert all_equal(sums([survivor, stopped]))


def test_a_peer_that_does_not_come_fails_the_meeting_in_time(store: str, start: Start) -> None:
    ranks = start(2)
    key = f"missing-{time.monotonic_ns()}"
    began_at = time.monotonic()
    meetings = [rank.begin("meet", store, key, place, 3, connect_timeout_s=1.0) for place, rank in enumerate(ranks)]
    for meeting in meetings:
        with pytest.raises(RankError) as refused:
            meeting.result(30.0)
        assert refused.value.kind in ("RuntimeError", "DistStoreError", "DistNetworkError")
    took_s = time.monotonic() - began_at
    print(f"a missing peer: noticed after {took_s:.2f} s")
    assert 0.9 < took_s < 10.0
    meet(store, ranks, "without it")
    assert all_equal(sums(ranks))


def test_no_store_is_an_error_that_names_its_address(start: Start) -> None:
    [rank] = start(1)
    address = f"{LOCALHOST}:{free_port()}"
    with pytest.raises(RankError, match=f"no TCPStore answers at {address}"):
        rank.call("connect", address, 1.0, within_s=30.0)
    with pytest.raises(RankError, match=r"'somewhere' has no port.*--store"):
        rank.call("connect", "somewhere", 1.0)


def test_a_collective_past_its_timeout_fails(store: str, start: Start) -> None:
    survivor, stopped = start(2)
    meet(store, [survivor, stopped], "timeout", timeout_s=1.0)
    stopped.stop()
    error, _ = survivor.call("wait_in_all_reduce", within_s=30.0)
    assert error


def test_an_abort_leaves_all_other_sockets_alone(store: str, start: Start) -> None:
    ranks = start(2)
    for rank in ranks:
        rank.call("open_sockets")
    meet(store, ranks, "sockets")
    assert all_equal(sums(ranks))
    for rank in ranks:
        rank.call("abort")
        rank.call("abort")
        assert rank.call("use_sockets") == b"old new"
        rank.call("drop")
        assert rank.call("use_sockets") == b"old new"


def test_a_connection_of_another_thread_that_opens_meanwhile_survives(store: str, start: Start) -> None:
    """The script's own connections, and the Agent's, come and go while a group waits for a late peer."""
    early, late = start(2)
    key = f"meanwhile-{time.monotonic_ns()}"
    meeting = early.begin("meet", store, key, 0, 2)
    eventually(lambda: early.call("is_connecting"), "it waits for its peer")
    early.call("open_sockets")
    late.call("meet", store, key, 1, 2)
    meeting.result()
    assert all_equal(sums([early, late]))
    early.call("abort")
    assert early.call("use_sockets") == b"old new"


@pytest.mark.parametrize("waits_in", [0, 1])
def test_an_abort_ends_every_group_that_was_made_for_torch(store: str, start: Start, waits_in: int) -> None:
    """A script may wrap two models, each with a group of its own."""
    survivor, stopped = start(2)
    meet(store, [survivor, stopped], "torch")
    for pending in [rank.begin("meet_for_torch", "first", "second") for rank in (survivor, stopped)]:
        pending.result()
    assert [pending.result() for pending in [rank.begin("sum_for_torch") for rank in (survivor, stopped)]] == [
        [2.0, 2.0],
        [2.0, 2.0],
    ]
    stopped.stop()
    [waiting] = wait_in_all_reduce([survivor], waits_in)
    survivor.call("abort")
    error, _ = waiting.result(ABORT_WITHIN_S)
    assert error


def test_reconfigurations_leak_no_descriptor_and_no_thread(store: str, start: Start) -> None:
    ranks = start(2)

    def reconfigure(count: int) -> None:
        key = f"again-{time.monotonic_ns()}"
        pending = [rank.begin("reconfigure", store, key, place, 2, count) for place, rank in enumerate(ranks)]
        for each in pending:
            each.result()

    reconfigure(3)
    before = [rank.call("held") for rank in ranks]
    reconfigure(RECONFIGURATIONS)
    for rank, (descriptors, threads) in zip(ranks, before, strict=True):
        eventually(lambda rank=rank, d=descriptors: rank.call("held")[0] <= d, f"{descriptors} descriptors")
        eventually(lambda rank=rank, t=threads: rank.call("held")[1] <= t, f"{threads} threads")


def test_failed_meetings_leak_no_descriptor_and_no_thread(store: str, start: Start) -> None:
    [rank] = start(1)

    def fail(count: int) -> None:
        for number in range(count):
            with pytest.raises(RankError):
                rank.call("meet", store, f"alone-{number}-{time.monotonic_ns()}", 0, 2, connect_timeout_s=0.1)
            rank.call("drop")

    fail(2)
    descriptors, threads = rank.call("held")
    fail(5)
    eventually(lambda: rank.call("held")[0] <= descriptors, f"{descriptors} descriptors")
    eventually(lambda: rank.call("held")[1] <= threads, f"{threads} threads")
