"""Which ranks of the group are present, according to their watches.

A rank is lost when its watch or its process ends, never by a missing heartbeat. A rank that does not come back within
RETURNS_WITHIN_S is given up: the processes that it has left behind would wait for it in vain. The end of an old watch
never touches a newer watch of the same rank. A rank without a watch counts as present for as long as its manager runs,
unless a rank timeout is set: then it is lost after that time without a call under way.
"""

from collections.abc import Container, Iterable, Set

from manager.group.records import LostRank, OpenWatch, Rank, ReplicaGroup

RETURNS_WITHIN_S = 10.0
"""How long a lost rank may take to come back before its mates are told that it does not. Longer than a launcher needs
to end the mates itself when the rank's process has ended."""


class RankPresence:
    def __init__(
        self,
        group: ReplicaGroup,
        rank_timeout_s: float | None = None,
        returns_within_s: float = RETURNS_WITHIN_S,
    ) -> None:
        self._group = group
        self._rank_timeout_s = rank_timeout_s
        self._returns_within_s = returns_within_s

    @property
    def is_complete(self) -> bool:
        """Every rank is watched."""
        return all(rank.watch is not None for rank in self._group.ranks)

    @property
    def is_starting(self) -> bool:
        """Some rank has never come."""
        return any(not rank.is_present and rank.loss is None for rank in self._group.ranks)

    @property
    def has_ranks(self) -> bool:
        """Some rank is present, watched or not."""
        return any(rank.is_present for rank in self._group.ranks)

    @property
    def losses(self) -> list[LostRank]:
        """The ranks that are lost and have not come back."""
        return [rank.loss for rank in self._group.ranks if rank.loss is not None]

    @property
    def staying_ranks(self) -> set[int]:
        """The watched ranks whose script goes on."""
        return {rank.group_rank for rank in self._group.ranks if rank.watch is not None and not rank.watch.has_left}

    @property
    def missed(self) -> list[int]:
        """The lost ranks that have been given up."""
        return [loss.group_rank for loss in self.losses if loss.is_given_up]

    def loss_of(self, group_rank: int) -> LostRank:
        """Return the record of a rank that is lost."""
        loss = self._group.ranks[group_rank].loss
        assert loss is not None
        return loss

    def staying(self) -> tuple[int, ...]:
        """Return the watches of all processes that go on."""
        return tuple(number for number, watch in self._group.watches.items() if not watch.has_left)

    def of(self, processes: Container[str]) -> tuple[int, ...]:
        """Return the watches of these processes."""
        return tuple(number for number, watch in self._group.watches.items() if watch.rank_incarnation in processes)

    def is_watched(self, group_rank: int, rank_incarnation: str) -> bool:
        watch = self._group.ranks[group_rank].watch if 0 <= group_rank < self._group.size else None
        return watch is not None and watch.rank_incarnation == rank_incarnation

    def asked(self, group_rank: int) -> None:
        """Note that a rank, watched or not, has asked for a quorum: it is present."""
        if 0 <= group_rank < self._group.size:
            rank = self._group.ranks[group_rank]
            rank.has_asked = True
            self.moves_on(group_rank)
            rank.loss = None

    def opened(self, number: int, group_rank: int, rank_incarnation: str) -> bool:
        """Add a watch. Return whether it replaces another process of that rank, which is lost by that."""
        rank = self._group.ranks[group_rank]
        old = rank.watch
        rank.watch = self._group.watches[number] = OpenWatch(number, group_rank, rank_incarnation)
        rank.process = rank_incarnation
        rank.loss = None
        if old is None or old.rank_incarnation == rank_incarnation:
            return False
        self.moves_on(group_rank)
        return True

    def leaves(self, number: int, mates: Set[int] = frozenset()) -> bool:
        """Note that a process ends in good order, and stays until these `mates` have moved on.

        Return whether it is its rank's present process; an older one does not stay."""
        watch = self._group.watches.get(number)
        if watch is None:
            return False
        is_present = self._group.ranks[watch.group_rank].watch is watch
        watch.has_left = True
        watch.mates = set(mates - {watch.group_rank}) if is_present else set[int]()
        self.moves_on(watch.group_rank)
        return is_present

    def moves_on(self, group_rank: int) -> None:
        """Note that a rank no longer needs the ranks that leave."""
        for watch in self._group.watches.values():
            watch.mates.discard(group_rank)

    def release(self) -> tuple[int, ...]:
        """Return the watches of the processes that leave and that no mate needs any more, each once."""
        leaving = [
            watch
            for watch in self._group.watches.values()
            if watch.has_left and not watch.mates and not watch.is_released
        ]
        for watch in leaving:
            watch.is_released = True
        return tuple(watch.number for watch in leaving)

    def started(self, group_ranks: Iterable[int] | None = None) -> None:
        """Note that a supervisor has restarted those of these ranks that are lost; None: all lost ranks."""
        for loss in self.losses:
            loss.is_restarted |= group_ranks is None or loss.group_rank in group_ranks

    def ended(self, number: int, now: float) -> int | None:
        """Remove a watch. Return the rank that is lost by that, or None."""
        watch = self._group.watches.pop(number, None)
        if watch is None or self._group.ranks[watch.group_rank].watch is not watch:
            return None
        rank = self._group.ranks[watch.group_rank]
        self._lose(rank, f"rank {watch.group_rank} has ended", now, has_left=watch.has_left)
        return watch.group_rank

    def failed(self, group_rank: int, rank_incarnation: str, reason: str, now: float) -> bool:
        """Note that a process reports its own failure. Return whether its rank is lost by that."""
        if not self.is_watched(group_rank, rank_incarnation):
            return False
        self._lose(self._group.ranks[group_rank], f"rank {group_rank} has failed: {reason}", now)
        return True

    @property
    def times_out(self) -> bool:
        """A rank timeout is set."""
        return self._rank_timeout_s is not None

    def shift(self, by_s: float) -> None:
        """Move all moments: the manager was paused for that long, and could not see a rank come back or call."""
        for rank in self._group.ranks:
            rank.heard_at += by_s
        for loss in self.losses:
            loss.lost_at += by_s

    def heard(self, group_ranks: Iterable[int], now: float) -> None:
        """Note that these ranks have calls under way."""
        if self.times_out:
            for rank in group_ranks:
                if 0 <= rank < self._group.size:
                    self._group.ranks[rank].heard_at = now

    def expire(self, now: float) -> list[int]:
        """Return the ranks that are lost by their silence, each once."""
        silent = [rank for rank in self._unwatched if self._silent_at(rank) <= now]
        for rank in silent:
            how = f"rank {rank.group_rank} has asked for nothing for {self._rank_timeout_s:g} s"
            self._lose(rank, how, now)
        return [rank.group_rank for rank in silent]

    def given_up(self, now: float) -> list[LostRank]:
        """Return the ranks that are lost and did not come back in time, each once."""
        over = [loss for loss in self._absent if self._returns_by(loss) <= now]
        for loss in over:
            loss.is_given_up = True
        return sorted(over, key=lambda loss: loss.lost_at)

    def deadline(self) -> float | None:
        """Return when the next rank is lost by its silence, or given up."""
        silent_at = map(self._silent_at, self._unwatched)
        return min((*silent_at, *map(self._returns_by, self._absent)), default=None)

    @property
    def _unwatched(self) -> list[Rank]:
        """The ranks whose silence counts."""
        if not self.times_out:
            return []
        return [rank for rank in self._group.ranks if rank.has_asked and rank.watch is None]

    @property
    def _absent(self) -> list[LostRank]:
        return [loss for loss in self.losses if not loss.is_given_up]

    def _silent_at(self, rank: Rank) -> float:
        assert self._rank_timeout_s is not None
        return rank.heard_at + self._rank_timeout_s

    def _returns_by(self, loss: LostRank) -> float:
        return loss.lost_at + self._returns_within_s

    def _lose(self, rank: Rank, how: str, now: float, *, has_left: bool = False) -> None:
        rank.watch = None
        self.moves_on(rank.group_rank)
        rank.has_asked = False
        mates = frozenset(m.process for m in self._group.ranks if m is not rank and m.process is not None)
        rank.loss = LostRank(rank.group_rank, now, mates, has_left, how)
