"""Groups of real ranks: how they meet, sum, wait in vain, and what they may leave behind."""

import time
from collections.abc import Callable

from tests.agent_client.ranks import Pending, Rank
from tests.processes import eventually

ENDS_WITHIN_S = 5.0  # and not the minutes of a group that waits


def key() -> str:
    """Of one meeting in the store."""
    return f"meeting-{time.monotonic_ns()}"


def meet(store: str, ranks: list[Rank], **options: float) -> None:
    name = key()
    meetings = [rank.begin("meet", store, name, place, len(ranks), **options) for place, rank in enumerate(ranks)]
    for meeting in meetings:
        meeting.result()


def sums(ranks: list[Rank], length: int = 1000) -> list[str]:
    return [each.result() for each in [rank.begin("all_reduce", seed, length) for seed, rank in enumerate(ranks)]]


def check_sums(ranks: list[Rank], length: int = 1000) -> None:
    assert len(set(sums(ranks, length))) == 1


def wait_in_all_reduce(ranks: list[Rank], torch_group: int | None = None) -> list[Pending]:
    """All of `ranks` wait in a collective that cannot end, since a peer is missing in it."""
    waiting = [rank.begin("wait_in_all_reduce", torch_group) for rank in ranks]
    for rank in ranks:
        eventually(lambda rank=rank: rank.call("get_is_reducing"), "it reduces")
    assert not waiting[0].is_done(within_s=0.1)
    return waiting


def check_abort_ends(ranks: list[Rank], waiting: list[Pending]) -> None:
    """Each ends its own wait: a neighbour's end is not seen by who waits for a stopped one."""
    aborts = [rank.begin("abort") for rank in ranks]
    began_at = min(abort.result(ENDS_WITHIN_S)[0] for abort in aborts)
    for each in waiting:
        error, ended_at = each.result(ENDS_WITHIN_S)
        assert error
        assert ended_at - began_at < ENDS_WITHIN_S


def check_leaves_nothing(ranks: list[Rank], act: Callable[[int], None], *, times: int) -> None:
    """No more descriptors and threads after `times` of `act` than after three."""
    act(3)
    before = [rank.call("held") for rank in ranks]
    act(times)
    for rank, (descriptors, threads) in zip(ranks, before, strict=True):
        eventually(lambda rank=rank, d=descriptors: rank.call("held")[0] <= d, f"{descriptors} descriptors")
        eventually(lambda rank=rank, t=threads: rank.call("held")[1] <= t, f"{threads} threads")


def reconfigure(store: str, ranks: list[Rank], count: int) -> None:
    name = key()
    for each in [rank.begin("reconfigure", store, name, place, 2, count) for place, rank in enumerate(ranks)]:
        each.result()
