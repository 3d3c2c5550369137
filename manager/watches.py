"""Which ranks of the group are there, as their watches tell.

A rank is lost when its watch or its process ends, never by a missing beat. The end of an old watch never touches a
newer one of the same rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Watch:
    group_rank: int
    worker: str


class Watches:
    def __init__(self, group_world_size: int) -> None:
        self._size = group_world_size
        self._open: dict[int, _Watch] = {}
        self._newest: dict[int, int] = {}
        self._asked: set[int] = set()
        self._lost: dict[int, str] = {}

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

    def why_lost(self, group_rank: int) -> str:
        """How one of them ended."""
        return self._lost[group_rank]

    def all(self) -> tuple[int, ...]:
        return tuple(self._open)

    def is_watched(self, group_rank: int, worker: str) -> bool:
        number = self._newest.get(group_rank)
        return number is not None and self._open[number].worker == worker

    def asked(self, group_rank: int) -> None:
        """A rank has asked for a quorum, watched or not: it is there."""
        if 0 <= group_rank < self._size:
            self._asked.add(group_rank)
            self._lost.pop(group_rank, None)

    def opened(self, watch: int, group_rank: int, worker: str) -> bool:
        """Whether another process of that rank was watched, which is lost by that."""
        old = self._newest.get(group_rank)
        self._open[watch] = _Watch(group_rank, worker)
        self._newest[group_rank] = watch
        self._lost.pop(group_rank, None)
        return old is not None and self._open[old].worker != worker

    def ended(self, watch: int) -> int | None:
        """The rank that is lost by that."""
        entry = self._open.pop(watch, None)
        if entry is None or self._newest.get(entry.group_rank) != watch:
            return None
        self._lose(entry.group_rank, f"rank {entry.group_rank} has ended")
        return entry.group_rank

    def failed(self, group_rank: int, worker: str, reason: str) -> bool:
        """Whether the rank is lost by that."""
        if not self.is_watched(group_rank, worker):
            return False
        self._lose(group_rank, f"rank {group_rank} has failed: {reason}")
        return True

    def _lose(self, group_rank: int, how: str) -> None:
        del self._newest[group_rank]
        self._asked.discard(group_rank)
        self._lost[group_rank] = how
