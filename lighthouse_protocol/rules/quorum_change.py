"""Differences between quorums, log lines about long waits for a quorum, and formatting of ranks.

A full list contains every group of the job, so a manager that already has a quorum receives only the changes. This
module does no I/O.

1. A digest over the full content, including the order of the members, identifies a quorum. A manager's join request
   contains the digest of the last quorum that it received, and the lighthouse sends only the changes since then.
2. A change lists departed, new and individually changed members. All others are unchanged, except that they share one
   new state (step, tag and the other fields of a join), which is sent once.
3. A change contains the digest of its result. If the result differs, the manager discards it and requests the full
   list.
4. If the ids of either quorum are not sorted and unique, the full list is sent.
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
        content = repr((quorum.quorum_id, *map(_all, quorum.participants)))
        return cls(quorum, hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest())


def change_between(old: Quorum, new: NamedQuorum) -> QuorumChange | None:
    """Return the change from `old` to `new`.

    Return None if the full list must be sent, because a list is not sorted or the quorums have no member in common.
    """
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


def apply_change(old: Quorum, change: QuorumChange) -> NamedQuorum | None:
    """Return the quorum that results from `change`, or None if `change` is not based on `old`."""
    listed = {member.wire_id for member in change.members}
    gone = set(change.gone)
    state = dict(zip(_STATE, _state(change.like), strict=True))
    stayed = (
        replace(member, **state)
        for at, member in enumerate(old.participants)
        if at not in gone and member.wire_id not in listed
    )
    participants = sorted((*stayed, *change.members), key=attrgetter("wire_id"))
    made = NamedQuorum.of(Quorum(change.quorum_id, tuple(participants)))
    return made if made.digest == change.digest else None


def _is_ordered(participants: tuple[Participant, ...]) -> bool:
    return all(one.wire_id < other.wire_id for one, other in pairwise(participants))


# A long wait for a quorum is logged when it has lasted LOGGED_AFTER_S, when its reason changes, and every minute. A
# rank repeats a request that timed out, so a wait may have short gaps. It ends when a request is answered.

LOGGED_AFTER_S = 5.0
CHANGED_AFTER_S = 10.0
REPEATED_AFTER_S = 60.0
CHECKED_EVERY_S = 1.0
RETRIED_WITHIN_S = 2.0


class QuorumWait:
    """Tracks a group's wait for a quorum and formats its log lines. All times are from one monotonic clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._left_at: float | None = None
        self._logged: str | None = None
        self._logged_at = 0.0

    def begin(self, now: float) -> None:
        """Start the wait, or continue it after a pause of up to RETRIED_WITHIN_S."""
        if self._left_at is not None and now > self._left_at + RETRIED_WITHIN_S:
            self.finish(now)
        self._since, self._left_at = now if self._since is None else self._since, None

    def pause(self, now: float) -> None:
        """Pause the wait. Call this when the last waiting request has ended without an answer."""
        if self._since is not None and self._left_at is None:
            self._left_at = now

    def finish(self, now: float) -> str:
        """End the wait. Return the closing log line, or an empty string if nothing has been logged about the wait."""
        logged, since = self._logged, self._since
        self._since = self._left_at = self._logged = None
        return "" if logged is None or since is None else f"there is a quorum, after {now - since:.0f} s"

    def next_line(self, waiting_for: str, now: float) -> str:
        """Return the log line that is due, or an empty string. `waiting_for` is the reason for the wait."""
        if self._since is None or self._left_at is not None or now < self._since + LOGGED_AFTER_S:
            return ""
        after_s = REPEATED_AFTER_S if waiting_for == self._logged else CHANGED_AFTER_S
        if self._logged is not None and now < self._logged_at + after_s:
            return ""
        self._logged, self._logged_at = waiting_for, now
        return f"no quorum for {now - self._since:.0f} s: waiting for {waiting_for}"


# Formatting of ranks and their places, for example: 1-7 behind in validation 0/25, 0 waiting in all_reduce.

MAX_LISTED = 16


def operation_name(rank: RankView) -> str:
    collective = rank.sample.inside or rank.sample.collective
    return (collective.operation or "a collective") if collective is not None else ""


def signature(rank: RankView) -> str:
    """Return the operation and shape of the rank's most recent collective, which must be equal on all participants."""
    collective = rank.sample.inside or rank.sample.collective
    return " ".join(filter(None, (collective.operation, collective.shape))) if collective is not None else ""


def describe_place(rank: RankView) -> str:
    if rank.sample.is_inside:
        return operation_name(rank)
    innermost = rank.sample.innermost
    return rank.sample.at or f"step {rank.sample.step}" if innermost.name == STEP else str(innermost)


def describe_activity(rank: RankView) -> str:
    if rank.sample.is_inside:
        return f"waiting in {operation_name(rank)}"
    return f"waiting for {rank.sample.waits_for}" if rank.sample.waits_for else f"in {describe_place(rank)}"


def group_ranks(key: Callable[[RankView], Hashable], ranks: Iterable[RankView]) -> list[list[RankView]]:
    """Group ranks by `key`, in order of first appearance."""
    found: dict[Hashable, list[RankView]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return list(found.values())


def describe_each(describe: Callable[[RankView], str], ranks: Iterable[RankView]) -> str:
    """Join the descriptions of all ranks. Ranks with the same description are listed together."""
    return ", ".join(f"{list_rank_views(party)} {describe(party[0])}" for party in group_ranks(describe, ranks))


def name_ranks(ranks: Sequence[RankView]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_rank_views(ranks)}"


def list_rank_views(ranks: Iterable[RankView]) -> str:
    return list_names(rank.name for rank in ranks)


def list_names(names: Iterable[RankName]) -> str:
    """Format rank names as ranges, for example "0, 3-5", or "a/0, b/3-5" for ranks in several groups."""
    ordered = sorted(names)
    return _listed(_runs(ordered), len(ordered))


def list_ranks(ranks: Set[int]) -> str:
    """Format the ranks in one group as list_names() does, in constant time per range of consecutive ranks."""
    runs = RankSet.of(ranks).runs()
    return _listed(((RankName("", first), RankName("", last)) for first, last in runs), len(ranks))


def _listed(runs: Iterable[tuple[RankName, RankName]], count: int) -> str:
    shown = list(islice(runs, MAX_LISTED))
    texts = [str(first) if first == last else f"{first}-{last.group_rank}" for first, last in shown]
    left = count - sum(last.group_rank - first.group_rank + 1 for first, last in shown)
    return ", ".join(texts) + (f" and {left} more" if left else "")


def describe_missing_ranks(replica_id: str, group_world_size: int, missing: Set[int]) -> str:
    """Format the present and missing ranks in a group, for example "a has ranks 0-3 of 8; missing: 4-7"."""
    here = RankSet.first(group_world_size) - missing
    has = f"{'rank' if len(here) == 1 else 'ranks'} {list_ranks(here)}" if here else "none"
    names = list_ranks(missing)
    return f"{replica_id} has {has} of {group_world_size}" + (f"; missing: {names}" if names else "")


def _runs(names: Sequence[RankName]) -> Iterator[tuple[RankName, RankName]]:
    """Yield the first and last name of each range of consecutive ranks in one group. `names` is sorted."""
    for _, run in groupby(enumerate(names), lambda at: (at[1].replica_id, at[1].group_rank - at[0])):
        members = [name for _, name in run]
        yield members[0], members[-1]
