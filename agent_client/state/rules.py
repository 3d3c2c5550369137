"""Rules of comparing states: the tensors that a check covers, and the participants that differ. No I/O.

A check covers one window of the tensors, and the windows take turns, so a full round of checks covers everything. A
small tensor costs more than its bytes, so the number of tensors in a window is limited too.

The largest set of equal digests is right. Of several sets with that size it is the set with the first participant.
Participants that heal, catch up or hold no state send no digest and are not judged.

All participants compare in the same steps, whatever their options: a missing collective would end the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DIVERGENCES = 3
"""How often a group may differ, and heal, without a full round of equal comparisons in between."""
WINDOW_BYTES = 2 * 2**20
LEAST_COST = WINDOW_BYTES // 48  # bytes that a tensor counts for at least

Digest = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements from `start` to `stop` of tensor number `index`."""

    index: int
    start: int
    stop: int


def windows(sizes: Sequence[tuple[int, int]], window_bytes: int = WINDOW_BYTES) -> list[list[Piece]]:
    """Divide tensors (number of elements, bytes per element) into windows, so that each element is in one of them."""
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
    """Return the number of steps between two comparisons, or 0 if a participant does not compare."""
    return max(intervals) if all(every > 0 for every in intervals) else 0


def differs(own: Digest, digests: Sequence[Digest | None]) -> bool:
    """Check whether `own`, which is not among the digests in `digests`, differs from the right one."""
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
    """Counts how often each participant has differed since a full round of equal comparisons."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    _equal: int = 0

    def compared(self, wrong: Sequence[str], windows: int) -> int:
        """Count a comparison in which the participants `wrong` differ. Return the highest count among them, or 0.

        `windows` is the number of windows in a full round.
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
