"""A state that is still arriving, for other targets that receive it: who reads a piece waits until it is here."""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence


class Arriving:
    """`layout`: the digest of its tensors. `places`: of the bytes of each piece. `starts`: where each begins in what
    follows the head of the encoding, and where the last one ends.

    Thread safe. Who waits for a piece waits as long as the transfer lasts, which has a deadline and ends this. A piece
    that is written again, because another lead has another one, does not match its checksum meanwhile. A state that has
    arrived stays in memory for as long as this is on offer.
    """

    def __init__(self, layout: str, places: Sequence[memoryview], starts: Sequence[int]) -> None:
        self.layout = layout
        self.body_length = starts[-1]
        self._places = places
        self._starts = starts
        self._changed = threading.Condition()
        self._checksums: dict[int, bytes] = {}
        self._is_ended = False

    def put(self, piece: int, checksum: bytes) -> None:
        """It is here."""
        with self._changed:
            self._checksums[piece] = checksum
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more comes. Unless all is here, what is here is let go, and who waits is told."""
        with self._changed:
            if len(self._checksums) < len(self._places):
                self._is_ended = True
                self._places = ()
            self._changed.notify_all()

    def stripe(self, start: int, stop: int) -> Iterator[memoryview]:
        """As of an Encoding, piece by piece as they come. ConnectionError for what will never be here."""
        piece = bisect_right(self._starts, start) - 1
        skipped, left = start - self._starts[piece], stop - start
        while left > 0:
            for part in self._await(piece):
                wanted = part[skipped : skipped + left]
                skipped = max(0, skipped - len(part))
                left -= len(wanted)
                if len(wanted):
                    yield wanted
            piece += 1

    def _await(self, piece: int) -> tuple[memoryview, memoryview]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or piece in self._checksums)
            if self._is_ended:
                raise ConnectionError("the state to be passed on did not arrive")
            return self._places[piece], memoryview(self._checksums[piece])
