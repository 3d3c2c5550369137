"""Ranks and their places in words: 1-7 behind in validation 0/25, 0 waiting in all_reduce."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from itertools import groupby, islice

from lighthouse_protocol.messages.progress import STEP, RankName, RankView
from lighthouse_protocol.rank_set import RankSet

MAX_LISTED = 16


def operation(rank: RankView) -> str:
    collective = rank.sample.inside or rank.sample.collective
    return (collective.operation or "a collective") if collective is not None else ""


def signature(rank: RankView) -> str:
    """What all who enter a collective must agree on."""
    collective = rank.sample.inside or rank.sample.collective
    return " ".join(filter(None, (collective.operation, collective.shape))) if collective is not None else ""


def place(rank: RankView) -> str:
    if rank.sample.is_inside:
        return operation(rank)
    innermost = rank.sample.innermost
    return rank.sample.at or f"step {rank.sample.step}" if innermost.name == STEP else str(innermost)


def doing(rank: RankView) -> str:
    if rank.sample.is_inside:
        return f"waiting in {operation(rank)}"
    return f"waiting for {rank.sample.waits_for}" if rank.sample.waits_for else f"in {place(rank)}"


def parties(key: Callable[[RankView], Hashable], ranks: Iterable[RankView]) -> list[list[RankView]]:
    """Those with the same key, in the order in which they come."""
    found: dict[Hashable, list[RankView]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return list(found.values())


def each(say: Callable[[RankView], str], ranks: Iterable[RankView]) -> str:
    """What is to be said of each, once for all of whom it is the same."""
    return ", ".join(f"{listed(party)} {say(party[0])}" for party in parties(say, ranks))


def named(ranks: Sequence[RankView]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


def listed(ranks: Iterable[RankView]) -> str:
    return list_names(rank.name for rank in ranks)


def list_names(names: Iterable[RankName]) -> str:
    """0, 3-5; of named groups a/0, b/3-5."""
    ordered = sorted(names)
    return _listed(_runs(ordered), len(ordered))


def list_ranks(ranks: Set[int]) -> str:
    """The same of one group's, without looking at each of them."""
    runs = RankSet.of(ranks).runs()
    return _listed(((RankName("", first), RankName("", last)) for first, last in runs), len(ranks))


def _listed(runs: Iterable[tuple[RankName, RankName]], count: int) -> str:
    listed = list(islice(runs, MAX_LISTED))
    texts = [str(first) if first == last else f"{first}-{last.group_rank}" for first, last in listed]
    left = count - sum(last.group_rank - first.group_rank + 1 for first, last in listed)
    return ", ".join(texts) + (f" and {left} more" if left else "")


def here_and_missing(replica_id: str, group_world_size: int, missing: Set[int]) -> str:
    """a has ranks 0-3 of 8; missing: 4-7"""
    here = RankSet.first(group_world_size) - missing
    has = f"{'rank' if len(here) == 1 else 'ranks'} {list_ranks(here)}" if here else "none"
    names = list_ranks(missing)
    return f"{replica_id} has {has} of {group_world_size}" + (f"; missing: {names}" if names else "")


def _runs(names: Sequence[RankName]) -> Iterator[tuple[RankName, RankName]]:
    """Neighbours of one group together, as the first and the last."""
    for _, run in groupby(enumerate(names), lambda at: (at[1].replica_id, at[1].group_rank - at[0])):
        members = [name for _, name in run]
        yield members[0], members[-1]
