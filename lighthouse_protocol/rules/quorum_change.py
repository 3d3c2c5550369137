"""What a manager is told that holds a quorum already: what has changed, in place of a list as long as the job.

1. A quorum is named by a digest of all that it says. Whoever names the same one holds the same quorum, order and all. A
   manager names the last one that it was told in its join, and is told what has changed since that one alone.
2. A change lists who has gone, who is new, and who has changed in a way of its own. All others are who they were at the
   same addresses, and have come to one and the same state (step, tag and what else a join says): it is told once.
3. A change names what is to come of it. Where something else does, nothing does, and the whole list is asked for.
4. A list that is not in the order of its ids, each once, has no changes: it is told whole.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice, pairwise
from operator import attrgetter

from lighthouse_protocol.messages.membership import Participant, Quorum, QuorumChange
from lighthouse_protocol.messages.progress import STEP, RankName, RankView
from lighthouse_protocol.rank_set import RankSet

_WHO = (
    "replica_id",
    "incarnation",
    "wire_id",
    "address",
    "store_address",
    "group_world_size",
    "data",
    "resolves_to_loopback",
    "extras",
)
_STATE = tuple(f.name for f in fields(Participant) if f.name not in (*_WHO, "wire"))
_who, _state, _all = attrgetter(*_WHO), attrgetter(*_STATE), attrgetter(*_WHO, *_STATE)


@dataclass(frozen=True, slots=True)
class NamedQuorum:
    quorum: Quorum
    digest: str

    @classmethod
    def of(cls, quorum: Quorum) -> "NamedQuorum":
        said = repr((quorum.quorum_id, *map(_all, quorum.participants)))
        return cls(quorum, hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest())


def change_between(old: Quorum, new: NamedQuorum) -> QuorumChange | None:
    """None: it would be no shorter than the list."""
    before, after = old.participants, new.quorum.participants
    if not (_is_ordered(before) and _is_ordered(after)):
        return None
    known = {member.wire_id: _who(member) for member in before}
    states = Counter(_state(member) for member in after if known.get(member.wire_id) == _who(member))
    if not states:
        return None
    [(common, _)] = states.most_common(1)
    alike = [m for m in after if known.get(m.wire_id) == _who(m) and _state(m) == common]
    names, alike_names = {m.wire_id for m in after}, {m.wire_id for m in alike}
    return QuorumChange(
        new.digest,
        new.quorum.quorum_id,
        like=alike[0],
        gone=tuple(at for at, member in enumerate(before) if member.wire_id not in names),
        members=tuple(member for member in after if member.wire_id not in alike_names),
    )


def changed(old: Quorum, change: QuorumChange) -> NamedQuorum | None:
    """None: `change` is not about `old`."""
    told = {member.wire_id for member in change.members}
    gone = set(change.gone)
    state = dict(zip(_STATE, _state(change.like), strict=True))
    stayed = (
        replace(member, **state)
        for at, member in enumerate(old.participants)
        if at not in gone and member.wire_id not in told
    )
    participants = sorted((*stayed, *change.members), key=attrgetter("wire_id"))
    made = NamedQuorum.of(Quorum(change.quorum_id, tuple(participants)))
    return made if made.digest == change.digest else None


def _is_ordered(participants: tuple[Participant, ...]) -> bool:
    return all(one.wire_id < other.wire_id for one, other in pairwise(participants))


# -- quorum wait --------------------------------------------------------------
#
# When a wait for a quorum is worth a line: once it lasts, when its reason changes, and every minute. No I/O.
#
# A request whose time is over is asked again: a wait goes on over such gaps, and ends with an answer.

SAID_AFTER_S = 5.0
CHANGED_AFTER_S = 10.0
REPEATED_AFTER_S = 60.0
LOOKED_EVERY_S = 1.0
ASKED_AGAIN_WITHIN_S = 2.0


class QuorumWait:
    """Time is the caller's monotonic clock and never goes back."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._left_at: float | None = None
        self._said: str | None = None
        self._said_at = 0.0

    @property
    def is_under_way(self) -> bool:
        return self._since is not None and self._left_at is None

    def begin(self, now: float) -> None:
        """A request waits. It may have waited before."""
        if self._left_at is not None and now > self._left_at + ASKED_AGAIN_WITHIN_S:
            self.answered(now)
        self._since, self._left_at = now if self._since is None else self._since, None

    def leave(self, now: float) -> None:
        """No request waits, and none was answered."""
        if self.is_under_way:
            self._left_at = now

    def answered(self, now: float) -> str:
        """The line that ends those that were said; empty: there were none."""
        said, since = self._said, self._since
        self._since = self._left_at = self._said = None
        return "" if said is None or since is None else f"there is a quorum, after {now - since:.0f} s"

    def next_at(self, now: float) -> float | None:
        """When to ask for news again; None: no request waits."""
        if self._since is None or self._left_at is not None:
            return None
        if self._said is None:
            return self._since + SAID_AFTER_S
        return max(self._said_at + CHANGED_AFTER_S, now + LOOKED_EVERY_S)

    def news(self, waiting_for: str, now: float) -> str:
        """The line that is due; empty: none is."""
        if self._since is None or self._left_at is not None or now < self._since + SAID_AFTER_S:
            return ""
        after_s = REPEATED_AFTER_S if waiting_for == self._said else CHANGED_AFTER_S
        if self._said is not None and now < self._said_at + after_s:
            return ""
        self._said, self._said_at = waiting_for, now
        return f"no quorum for {now - self._since:.0f} s: waiting for {waiting_for}"


# -- rank text ----------------------------------------------------------------
#
# Ranks and their places in words: 1-7 behind in validation 0/25, 0 waiting in all_reduce.

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
