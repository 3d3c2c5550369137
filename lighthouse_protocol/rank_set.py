"""A set of ranks, stored as the bits of one integer. 65,536 ranks take 8 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from functools import lru_cache


class RankSet(Set[int]):
    """An immutable set of ranks. It equals any other set with the same ranks."""

    __slots__ = ("bits",)

    def __init__(self, ranks: Iterable[int] = (), *, bits: int = 0) -> None:
        """Create a set from rank numbers, a bit mask or both. Bit k of `bits` stands for rank k."""
        for rank in ranks:
            bits |= 1 << rank
        self.bits = bits

    @staticmethod
    @lru_cache(maxsize=16)
    def first(count: int) -> RankSet:
        """Return the ranks 0 to count - 1. The result is cached, because a job's groups usually have the same size."""
        return RankSet(bits=(1 << count) - 1)

    @classmethod
    def of(cls, ranks: Set[int]) -> RankSet:
        """Convert any set of ranks to a RankSet. Return `ranks` itself if it already is one."""
        return ranks if isinstance(ranks, cls) else cls(ranks)

    @classmethod
    def from_bytes(cls, octets: bytes) -> RankSet:
        """Decode a bit mask. Rank 0 is the lowest bit of the first byte."""
        return cls(bits=int.from_bytes(octets, "little"))

    def to_bytes(self) -> bytes:
        """Encode as a bit mask without trailing zero bytes."""
        return self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last rank of each run of consecutive ranks, in order."""
        bits, at = self.bits, 0
        while bits:
            gap = (bits & -bits).bit_length() - 1
            bits >>= gap
            length = (~bits & (bits + 1)).bit_length() - 1
            yield at + gap, at + gap + length - 1
            bits >>= length
            at += gap + length

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self.bits >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.runs():
            yield from range(first, last + 1)

    def __eq__(self, other: object) -> bool:
        return self.bits == other.bits if isinstance(other, RankSet) else super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash()  # equals the hash of a frozenset with these ranks

    def __and__(self, other: Set[object]) -> RankSet:
        return RankSet(bits=self.bits & _bits(other))

    def __or__(self, other: Set[int]) -> RankSet:  # type: ignore[override]
        return RankSet(bits=self.bits | _bits(other))

    def __sub__(self, other: Set[object]) -> RankSet:
        return RankSet(bits=self.bits & ~_bits(other))

    def __repr__(self) -> str:
        return f"RankSet({', '.join(str(a) if a == b else f'{a}-{b}' for a, b in self.runs())})"


NO_RANKS = RankSet()


def _bits(other: Set[object]) -> int:
    if isinstance(other, RankSet):
        return other.bits
    return RankSet(rank for rank in other if isinstance(rank, int) and rank >= 0).bits


def largest_count(sets: Iterable[RankSet]) -> int:
    """Return how many of the sets contain the most frequent rank, or 0 if all sets are empty.

    Counts all ranks at once, with binary counters whose bits are spread over several integers.
    """
    planes: list[int] = []  # plane k holds bit k of every rank's counter
    for each in sets:
        carry = each.bits
        for at, plane in enumerate(planes):
            planes[at], carry = plane ^ carry, plane & carry
            if not carry:
                break
        if carry:
            planes.append(carry)
    ranks, count = -1, 0
    for at in reversed(range(len(planes))):
        if ranks & planes[at]:
            ranks &= planes[at]
            count |= 1 << at
    return count
