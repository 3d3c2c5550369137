"""Rules that decide which ranks in a group are present, lost or given up. This module does no I/O.

A *watch* is the stream that an Agent's process keeps open to its manager.

1. A rank is lost when its watch closes or its process exits, never because of a missing heartbeat. The end of an old
   watch does not affect a newer watch of the same rank.
2. A rank that does not return within RETURNS_WITHIN_S of its loss is given up, because the other ranks would wait for
   it forever.
3. A rank without a watch counts as present from its first request on. If a rank timeout is set, such a rank is lost
   after that time without a call in progress. A process whose watch has closed returns only with another watch, because
   its last request may arrive after it has exited.
4. A process that is about to exit normally waits until the group's other ranks, its `mates`, no longer need its data.
"""

import math
from collections.abc import Container, Iterable, Set

from lighthouse_protocol.messages.session import LEFT, RESTARTING, STARTING, HoldState
from manager.group.records import LostRank, OpenWatch, Rank, ReplicaGroup

RETURNS_WITHIN_S = 10.0
"""Time in seconds within which a lost rank must return. Launchers that stop the other ranks do so sooner."""


class RankPresence:
    """Records which ranks are present, and finds the ranks that exceed a timeout.

    A rank without a watch is lost after `rank_timeout_s` without a call. A lost rank is given up if it does not return
    within `returns_within_s`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        rank_timeout_s: float | None = None,
        returns_within_s: float = RETURNS_WITHIN_S,
    ) -> None:
        self._group = group
        self.rank_timeout_s = rank_timeout_s
        self._returns_within_s = returns_within_s

    @property
    def is_complete(self) -> bool:
        """True if every rank has an open watch."""
        return all(rank.watch is not None for rank in self._group.ranks)

    @property
    def are_agents(self) -> bool:
        """True if every rank has or had a watch, as only Agents do."""
        return all(rank.process is not None for rank in self._group.ranks)

    @property
    def has_ranks(self) -> bool:
        """True if any rank is present, with or without a watch."""
        return any(rank.watch is not None or rank.has_asked for rank in self._group.ranks)

    @property
    def losses(self) -> list[LostRank]:
        """Records of the ranks that are lost and have not returned."""
        return [rank.loss for rank in self._group.ranks if rank.loss is not None]

    @property
    def staying_ranks(self) -> set[int]:
        """The watched ranks that have not announced that they will exit."""
        return {rank.group_rank for rank in self._group.ranks if rank.watch is not None and not rank.watch.has_left}

    def absence(self) -> tuple[str, frozenset[int]]:
        """Return (reason, missing): why the group cannot train, empty if it can, and the ranks that are missing."""
        missing: list[int] = []
        losses: list[LostRank] = []
        for rank in self._group.ranks:
            if rank.watch is None and not rank.has_asked:
                missing.append(rank.group_rank)
                if rank.loss is not None:
                    losses.append(rank.loss)
        standing = self._group.standing
        if standing is not None and standing.mode is HoldState.LEAVING:
            reason = LEFT
        elif losses:
            reason = RESTARTING if all(loss.is_restarted for loss in losses) else losses[0].reason
        else:
            reason = STARTING if missing else ""
        return reason, frozenset(missing)

    def loss_of(self, group_rank: int) -> LostRank:
        loss = self._group.ranks[group_rank].loss
        assert loss is not None
        return loss

    def staying_watches(self) -> tuple[int, ...]:
        """Return the watch numbers of all processes that have not announced that they will exit."""
        return tuple(number for number, watch in self._group.watches.items() if not watch.has_left)

    def watches_of(self, processes: Container[str]) -> tuple[int, ...]:
        """Return the watch numbers of the processes whose rank incarnations are in `processes`."""
        return tuple(number for number, watch in self._group.watches.items() if watch.rank_incarnation in processes)

    def is_watched(self, group_rank: int, rank_incarnation: str) -> bool:
        watch = self._group.ranks[group_rank].watch if 0 <= group_rank < self._group.size else None
        return watch is not None and watch.rank_incarnation == rank_incarnation

    def has_closed_watch(self, group_rank: int, rank_incarnation: str) -> bool:
        """Return whether this process of the rank has lost its watch. It counts as lost until it opens another one."""
        rank = self._group.ranks[group_rank]
        return rank.loss is not None and bool(rank_incarnation) and rank_incarnation == rank.process

    def record_request(self, group_rank: int) -> None:
        """Record that a rank has requested a quorum, which makes it present even if it has no watch."""
        rank = self._group.ranks[group_rank]
        rank.has_asked, rank.loss = True, None
        self.remove_mate(group_rank)

    def open_watch(self, number: int, group_rank: int, rank_incarnation: str) -> bool:
        """Add a watch. Return True if it replaces the open watch of another process, which then counts as lost."""
        rank = self._group.ranks[group_rank]
        old = rank.watch
        rank.watch = self._group.watches[number] = OpenWatch(number, group_rank, rank_incarnation)
        rank.process = rank_incarnation
        rank.loss = None
        if old is None or old.rank_incarnation == rank_incarnation:
            return False
        self.remove_mate(group_rank)
        return True

    def begin_leaving(self, number: int, mates: Set[int] = frozenset()) -> bool:
        """Record that the process of watch `number` will exit normally once no rank in `mates` needs its data.

        Return True for the rank's current process, and False for an older one, which may exit immediately.
        """
        watch = self._group.watches.get(number)
        if watch is None:
            return False
        is_present = self._group.ranks[watch.group_rank].watch is watch
        watch.has_left = True
        watch.mates = set(mates - {watch.group_rank}) if is_present else set[int]()
        self.remove_mate(watch.group_rank)
        return is_present

    def remove_mate(self, group_rank: int) -> None:
        """Record that `group_rank` no longer needs the data of any process that is waiting to exit."""
        for watch in self._group.watches.values():
            watch.mates.discard(group_rank)

    def release(self) -> tuple[int, ...]:
        """Return the watch numbers of the processes that may exit now. Each is returned only once."""
        released: list[int] = []
        for watch in self._group.watches.values():
            if watch.has_left and not watch.mates and not watch.is_released:
                watch.is_released = True
                released.append(watch.number)
        return tuple(released)

    def record_restart(self, group_ranks: Iterable[int] | None = None) -> None:
        """Record that a supervisor has restarted the lost ranks among `group_ranks`, or all of them if it is None."""
        for loss in self.losses:
            loss.is_restarted |= group_ranks is None or loss.group_rank in group_ranks

    def end_watch(self, number: int, now: float) -> int | None:
        """Remove a watch. Return its rank, which is now lost, or None if this was not the rank's current watch."""
        watch = self._group.watches.pop(number, None)
        if watch is None or self._group.ranks[watch.group_rank].watch is not watch:
            return None
        rank = self._group.ranks[watch.group_rank]
        self._mark_lost(rank, f"rank {watch.group_rank} has ended", now, has_left=watch.has_left)
        return watch.group_rank

    def record_rank_failure(self, group_rank: int, rank_incarnation: str, reason: str, now: float) -> bool:
        """Mark a rank as lost because its process reports a failure. Return False if this process has no open watch."""
        if not self.is_watched(group_rank, rank_incarnation):
            return False
        self._mark_lost(self._group.ranks[group_rank], f"rank {group_rank} has failed: {reason}", now)
        return True

    def postpone_timeouts(self, by_s: float) -> None:
        """Postpone all timeouts by `by_s` seconds after the manager itself was paused for that time.

        During the pause, the manager could not receive the ranks' calls.
        """
        for rank in self._group.ranks:
            rank.heard_at += by_s
        for loss in self.losses:
            loss.lost_at += by_s

    def restart_timeout(self, group_ranks: Iterable[int], now: float) -> None:
        """Restart the rank timeout of the given ranks, because they have calls in progress."""
        for rank in group_ranks:
            if 0 <= rank < self._group.size:
                self._group.ranks[rank].heard_at = now

    def expire_ranks(self, now: float) -> list[int]:
        """Mark the ranks that have exceeded the rank timeout as lost, and return them."""
        silent = [rank for rank in self._group.ranks if rank.loss is None and self._expires_at(rank) <= now]
        for rank in silent:
            how = f"rank {rank.group_rank} has sent no request for {self.rank_timeout_s:g} s"
            self._mark_lost(rank, how, now)
        return [rank.group_rank for rank in silent]

    def give_up_ranks(self, now: float) -> list[LostRank]:
        """Give up the lost ranks that have not returned in time, and return them, the earliest loss first."""
        over = [rank.loss for rank in self._group.ranks if rank.loss is not None and self._expires_at(rank) <= now]
        for loss in over:
            loss.is_given_up = True
        return sorted(over, key=lambda loss: loss.lost_at)

    def deadline(self) -> float | None:
        """Return when the next rank will exceed the rank timeout or be given up, or None if no rank will."""
        earliest = math.inf
        for rank in self._group.ranks:
            if rank.watch is None:
                earliest = min(earliest, self._expires_at(rank))
        return None if math.isinf(earliest) else earliest

    def _expires_at(self, rank: Rank) -> float:
        """Return when a lost rank will be given up, or when a rank without a watch will exceed the rank timeout.

        Return infinity if neither applies.
        """
        if rank.loss is not None:
            return math.inf if rank.loss.is_given_up else rank.loss.lost_at + self._returns_within_s
        is_unwatched = rank.has_asked and rank.watch is None
        return rank.heard_at + self.rank_timeout_s if is_unwatched and self.rank_timeout_s is not None else math.inf

    def _mark_lost(self, rank: Rank, how: str, now: float, *, has_left: bool = False) -> None:
        rank.watch = None
        self.remove_mate(rank.group_rank)
        rank.has_asked = False
        mates = frozenset(m.process for m in self._group.ranks if m is not rank and m.process is not None)
        rank.loss = LostRank(rank.group_rank, now, mates, has_left, how)
