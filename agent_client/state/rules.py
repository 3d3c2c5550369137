"""Rules for comparing states: which tensors a check covers, and which participants differ. No I/O.

1. A check covers one part of the tensors, a *window*. The windows are checked in turn. A check of each window is called
   a full round, and covers all tensors. A small tensor costs more than its size suggests, so the number of tensors in a
   window is also limited.
2. The digest that most participants send is right. If several digests are equally frequent, it is the one of the
   participant with the lowest replica_rank.
3. Participants that heal, catch up or hold no complete state send no digest, and their states are not compared.
4. All participants compare in the same steps, even if their options differ, because a missing collective would make the
   step fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DIVERGENCES = 3
"""Number of times that a group may differ, and heal, without a full round of equal comparisons in between."""
WINDOW_BYTES = 2 * 2**20
LEAST_COST = WINDOW_BYTES // 48  # a smaller tensor counts as this many bytes

Digest = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` (exclusive) of tensor number `index`."""

    index: int
    start: int
    stop: int


def windows(sizes: Sequence[tuple[int, int]], window_bytes: int = WINDOW_BYTES) -> list[list[Piece]]:
    """Divide tensors into windows, so that each element is in exactly one window.

    Args:
        sizes: (number of elements, bytes per element) of each tensor.
        window_bytes: Maximum size of a window in bytes.
    """
    found: list[list[Piece]] = [[]]
    room = window_bytes
    for index, (count, item_bytes) in enumerate(sizes):
        start = 0
        while start < count:
            if room < min(LEAST_COST, window_bytes):
                found.append([])
                room = window_bytes
            stop = min(count, start + max(1, room // item_bytes))
            found[-1].append(Piece(index, start, stop))
            room -= max((stop - start) * item_bytes, LEAST_COST)
            start = stop
    return found


def common_interval(intervals: Sequence[int]) -> int:
    """Return the largest of the participants' comparison intervals, in steps, or 0 if one of them is 0."""
    return max(intervals) if all(every > 0 for every in intervals) else 0


def differs(own: Digest, digests: Sequence[Digest | None]) -> bool:
    """Return whether `own`, an additional digest that is not in `digests`, differs from the right digest."""
    wrong = outliers(digests)
    right = next((digest for place, digest in enumerate(digests) if digest is not None and place not in wrong), own)
    return own != right


def outliers(digests: Sequence[Digest | None]) -> tuple[int, ...]:
    sets: dict[Digest, list[int]] = {}
    for place, digest in enumerate(digests):
        if digest is not None:
            sets.setdefault(digest, []).append(place)
    if len(sets) < 2:
        return ()
    right = max(sets.values(), key=lambda places: (len(places), -places[0]))
    return tuple(place for place, digest in enumerate(digests) if digest is not None and place not in right)


@dataclass(slots=True)
class Divergences:
    """Counts how often each participant has differed since the last full round of equal comparisons."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    _equal: int = 0

    def compared(self, wrong: Sequence[str], windows: int) -> int:
        """Record a comparison.

        Args:
            wrong: Names of the participants that differ, or none.
            windows: Number of windows in a full round.

        Returns:
            The highest count among these participants, or 0 if there are none.
        """
        if not wrong:
            self._equal += 1
            if self._equal >= windows:
                self.counts.clear()
            return 0
        self._equal = 0
        for name in wrong:
            self.counts[name] = self.counts.get(name, 0) + 1
        return max(self.counts[name] for name in wrong)
