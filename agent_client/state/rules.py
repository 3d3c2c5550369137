"""What a digest of the state covers, and which participants it finds to differ. No I/O.

A check covers a window of the tensors; the windows take turns, so that after as many checks as there are windows all
has been compared. A small tensor costs more than its bytes, so a window holds a bounded number of them, too.

The largest set of equal digests is right; of sets of one size, that which holds the first participant that gave one.
Those that heal, catch up, or hold no state give none and are not judged.

All participants compare in the same steps, whatever their options say: a collective that one leaves out ends the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DIVERGENCES = 3
"""So often a group may differ with no round of equal comparisons in between: it heals each time."""
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
    """`sizes`: (number of elements, bytes of each) of every tensor. All are covered, each element once."""
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


def common_interval(told: Sequence[int]) -> int:
    """How many steps lie between two comparisons, by what each participant asks for; 0: none compares."""
    return max(told) if all(every > 0 for every in told) else 0


def differs(own: Digest, told: Sequence[Digest | None]) -> bool:
    """Whether `own`, which is not judged, is another digest than the right one of `told`."""
    wrong = outliers(told)
    right = next((digest for place, digest in enumerate(told) if digest is not None and place not in wrong), own)
    return own != right


def outliers(told: Sequence[Digest | None]) -> tuple[int, ...]:
    """The places, by replica_rank, of those whose digest is not the right one."""
    sets: dict[Digest, list[int]] = {}
    for place, digest in enumerate(told):
        if digest is not None:
            sets.setdefault(digest, []).append(place)
    if len(sets) < 2:
        return ()
    right = max(sets.values(), key=lambda places: (len(places), -places[0]))
    return tuple(place for place, digest in enumerate(told) if digest is not None and place not in right)


@dataclass(slots=True)
class Divergences:
    """Counts how often each participant has differed since all windows were found equal."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    _equal: int = 0

    def compared(self, wrong: Sequence[str], windows: int) -> int:
        """Return how often those that differ now have differed; `windows`: how many there are."""
        if not wrong:
            self._equal += 1
            if self._equal >= windows:
                self.counts.clear()
            return 0
        self._equal = 0
        for name in wrong:
            self.counts[name] = self.counts.get(name, 0) + 1
        return max(self.counts[name] for name in wrong)
