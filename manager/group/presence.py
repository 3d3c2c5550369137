"""Which ranks of the group are there, as their watches tell.

A rank is lost when its watch or its process ends, never by a missing heartbeat. One that is not back after a while is
given up: its mates of then wait for it in vain. The end of an old watch never touches a newer one of the same rank. A
rank without a watch counts as there for as long as its manager is, unless a rank timeout bounds that: then it is lost
when it has had no call under way for so long.
"""

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass, replace

RETURNS_WITHIN_S = 10.0
"""How long a lost rank may take to come back before its mates are told that it does not: longer than its launcher needs
to end them, too, where its process has ended."""


@dataclass(frozen=True, slots=True)
class _Watch:
    group_rank: int
    rank_incarnation: str
    has_left: bool = False
    mates: Set[int] = frozenset()  # those that may still need it
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that was lost, and the processes that it has left behind. `has_left`: in good order."""

    group_rank: int
    lost_at: float
    mates: frozenset[str]
    has_left: bool


class RankPresence:
    def __init__(
        self,
        group_world_size: int,
        rank_timeout_s: float | None = None,
        returns_within_s: float = RETURNS_WITHIN_S,
    ) -> None:
        self._size = group_world_size
        self._rank_timeout_s = rank_timeout_s
        self._returns_within_s = returns_within_s
        self._heard_at: dict[int, float] = {}
        self._open: dict[int, _Watch] = {}
        self._newest: dict[int, int] = {}
        self._processes: dict[int, str] = {}  # of each rank, the one watched last: its watch may be between two
        self._asked: set[int] = set()
        self._lost: dict[int, str] = {}
        self._absent: dict[int, LostRank] = {}  # until they are back, or given up
        self._started: set[int] = set()  # those of the lost that are started again
        self.missing = frozenset(range(group_world_size))  # those that have not come, or have gone

    @property
    def is_complete(self) -> bool:
        """Every rank is watched."""
        return len(self._newest) == self._size

    @property
    def is_starting(self) -> bool:
        """Some rank has never come."""
        return len(self._asked | self._newest.keys() | self._lost.keys()) < self._size

    @property
    def has_ranks(self) -> bool:
        """Some rank is there, watched or not, for all that is known."""
        return bool(self._asked or self._newest)

    @property
    def lost(self) -> list[int]:
        """The ranks that have gone and not come back."""
        return sorted(self._lost)

    @property
    def is_restarting(self) -> bool:
        """All ranks that were lost are started again."""
        return self._lost.keys() <= self._started and bool(self._lost)

    @property
    def staying_ranks(self) -> set[int]:
        """The watched ranks whose script goes on."""
        return {rank for rank, watch in self._newest.items() if not self._open[watch].has_left}

    @property
    def missed(self) -> list[int]:
        """Those of them that are not waited for any more."""
        return sorted(self._lost.keys() - self._absent.keys())

    def why_lost(self, group_rank: int) -> str:
        """How one of them ended."""
        return self._lost[group_rank]

    def is_started(self, group_rank: int) -> bool:
        """Whether a lost rank is started again."""
        return group_rank in self._started

    def mates_of(self, group_rank: int) -> frozenset[str]:
        """The processes that a lost rank has left behind."""
        return self._absent[group_rank].mates

    def staying(self) -> tuple[int, ...]:
        """All but those of ranks that leave."""
        return tuple(number for number, watch in self._open.items() if not watch.has_left)

    def of(self, workers: Container[str]) -> tuple[int, ...]:
        """The watches of these processes."""
        return tuple(number for number, watch in self._open.items() if watch.rank_incarnation in workers)

    def is_watched(self, group_rank: int, rank_incarnation: str) -> bool:
        number = self._newest.get(group_rank)
        return number is not None and self._open[number].rank_incarnation == rank_incarnation

    def asked(self, group_rank: int) -> None:
        """A rank has asked for a quorum, watched or not: it is there."""
        if 0 <= group_rank < self._size:
            self._asked.add(group_rank)
            self.moves_on(group_rank)
            self._here(group_rank)

    def opened(self, watch: int, group_rank: int, rank_incarnation: str) -> bool:
        """Whether another process of that rank was watched, which is lost by that."""
        old = self._newest.get(group_rank)
        self._open[watch] = _Watch(group_rank, rank_incarnation)
        self._newest[group_rank] = watch
        self._processes[group_rank] = rank_incarnation
        self._here(group_rank)
        if old is None or self._open[old].rank_incarnation == rank_incarnation:
            return False
        self.moves_on(group_rank)
        return True

    def leaves(self, watch: int, mates: Set[int] = frozenset()) -> bool:
        """Its end is near, and in good order; it stays until these `mates` have moved on. Whether that is the rank's
        present process; no other stays."""
        entry = self._open.get(watch)
        if entry is None:
            return False
        is_present = self._newest.get(entry.group_rank) == watch
        others = mates - {entry.group_rank} if is_present else frozenset[int]()
        self._open[watch] = replace(entry, has_left=True, mates=others)
        self.moves_on(entry.group_rank)
        return is_present

    def moves_on(self, group_rank: int) -> None:
        """That rank does not need the ranks that have left any more."""
        for number, watch in self._open.items():
            if group_rank in watch.mates:
                self._open[number] = replace(watch, mates=watch.mates - {group_rank})

    def release(self) -> tuple[int, ...]:
        """The watches of the ranks that leave and that no mate needs any more, each once."""
        leaving = tuple(
            number
            for number, watch in self._open.items()
            if watch.has_left and not watch.mates and not watch.is_released
        )
        for number in leaving:
            self._open[number] = replace(self._open[number], is_released=True)
        return leaving

    def started(self, group_ranks: Iterable[int] | None = None) -> None:
        """Those of them that were lost are started again; None: all that were."""
        lost = self._lost.keys()
        self._started |= lost if group_ranks is None else lost & set(group_ranks)

    def ended(self, watch: int, now: float) -> int | None:
        """The rank that is lost by that."""
        entry = self._open.pop(watch, None)
        if entry is None or self._newest.get(entry.group_rank) != watch:
            return None
        self._lose(entry.group_rank, f"rank {entry.group_rank} has ended", now, has_left=entry.has_left)
        return entry.group_rank

    def failed(self, group_rank: int, rank_incarnation: str, reason: str, now: float) -> bool:
        """Whether the rank is lost by that."""
        if not self.is_watched(group_rank, rank_incarnation):
            return False
        self._lose(group_rank, f"rank {group_rank} has failed: {reason}", now)
        return True

    @property
    def times_out(self) -> bool:
        """Silence is counted."""
        return self._rank_timeout_s is not None

    def shift(self, by_s: float) -> None:
        """The manager was paused: no rank could come back, or be heard, for that long."""
        self._heard_at = {rank: heard_at + by_s for rank, heard_at in self._heard_at.items()}
        self._absent = {
            rank: replace(absence, lost_at=absence.lost_at + by_s) for rank, absence in self._absent.items()
        }

    def heard(self, group_ranks: Iterable[int], now: float) -> None:
        """They have calls under way."""
        if self.times_out:
            self._heard_at.update((rank, now) for rank in group_ranks)

    def expire(self, now: float) -> list[int]:
        """The ranks that are lost by their silence, each once."""
        if not self.times_out:
            return []
        silent = [rank for rank in self._unwatched if self._due_at(rank) <= now]
        for rank in silent:
            self._lose(rank, f"rank {rank} has asked for nothing for {self._rank_timeout_s:g} s", now)
        return silent

    def given_up(self, now: float) -> list[LostRank]:
        """The ranks that were lost and are not back in time, each once."""
        over = [absence for absence in self._absent.values() if self._returns_by(absence) <= now]
        for absence in over:
            del self._absent[absence.group_rank]
        return over

    def deadline(self) -> float | None:
        """When the next one is lost, if it stays silent, or given up, if it does not come back."""
        silent_at = map(self._due_at, self._unwatched) if self.times_out else ()
        return min((*silent_at, *map(self._returns_by, self._absent.values())), default=None)

    @property
    def _unwatched(self) -> set[int]:
        return self._asked - self._newest.keys()

    def _due_at(self, group_rank: int) -> float:
        assert self._rank_timeout_s is not None
        return self._heard_at.get(group_rank, 0.0) + self._rank_timeout_s

    def _returns_by(self, absence: LostRank) -> float:
        return absence.lost_at + self._returns_within_s

    def _here(self, group_rank: int) -> None:
        self._lost.pop(group_rank, None)
        self._absent.pop(group_rank, None)
        if group_rank in self.missing:
            self.missing -= {group_rank}

    def _lose(self, group_rank: int, how: str, now: float, *, has_left: bool = False) -> None:
        self._newest.pop(group_rank, None)
        self.moves_on(group_rank)
        self._asked.discard(group_rank)
        self._started.discard(group_rank)
        self._lost[group_rank] = how
        self.missing |= {group_rank}
        mates = frozenset(process for rank, process in self._processes.items() if rank != group_rank)
        self._absent[group_rank] = LostRank(group_rank, now, mates, has_left)
