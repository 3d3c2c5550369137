"""Which source a transfer reads next, and from which byte. Rules only: no I/O, no clock, no torch.

1. One source is read at a time, in the order given: the assigned one first.
2. A connection that breaks is opened again at the byte where it broke, after a pause. After TRIES in a row that brought
   no byte the source is passed over.
3. So is a source that refuses, sends what cannot be used, or sends nothing for `silence_s`. The next one starts at
   byte 0: what two groups hold is not the same byte for byte, since each has its own buffers.
4. The last source may be silent until the deadline.
5. When none is left, or the deadline has passed, the transfer has failed, and says what was wrong with each source.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TRIES = 4
FIRST_PAUSE_S = 0.05
"""Doubled with each further try."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection ended, or there was none; `received` bytes have arrived from this source so far."""

    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This source has not got the state, what it sent cannot be used, or it sends nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Read:
    """Ask `source` for the bytes from `offset` on, not before `at`; it may be silent for `silence_s` at a time."""

    source: str
    offset: int
    at: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """`reasons`: (source, what was wrong with it); those that were never asked are not among them."""

    reasons: tuple[tuple[str, str], ...]
    is_late: bool


class SourceOrder:
    def __init__(self, sources: Sequence[str], *, deadline: float, silence_s: float) -> None:
        if not sources:
            raise ValueError("a transfer needs a source")
        self._left = list(sources)
        self._deadline = deadline
        self._silence_s = silence_s
        self._reasons: list[tuple[str, str]] = []
        self._received = 0
        self._tries = 0

    def begin(self, now: float) -> Read | Failed:
        return self._read(now)

    def handle(self, event: Broken | Refused, now: float) -> Read | Failed:
        match event:
            case Broken(received, reason):
                self._break(received, reason)
            case Refused(reason):
                self._pass_over(reason)
        return self._read(now)

    def _break(self, received: int, reason: str) -> None:
        self._tries = 1 if received > self._received else self._tries + 1
        self._received = received
        if self._tries >= TRIES:
            self._pass_over(f"{reason} ({TRIES} times in a row)")

    def _pass_over(self, reason: str) -> None:
        self._reasons.append((self._left.pop(0), reason))
        self._received = self._tries = 0

    def _read(self, now: float) -> Read | Failed:
        if not self._left or now >= self._deadline:
            return Failed(tuple(self._reasons), is_late=now >= self._deadline)
        at = now + FIRST_PAUSE_S * 2 ** (self._tries - 1) if self._tries else now
        left_s = self._deadline - now
        silence_s = min(self._silence_s, left_s) if len(self._left) > 1 else left_s
        return Read(self._left[0], self._received, at, silence_s)
