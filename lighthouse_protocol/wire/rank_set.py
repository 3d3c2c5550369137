"""A set of ranks of a replica group, as bits."""

from collections.abc import Collection

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest


def ranks_to_bits(ranks: Collection[int]) -> bytes:
    """A bit each, that of rank 0 the lowest of the first byte: what is said of 65,536 ranks has 8 KiB."""
    bits = bytearray(max(ranks, default=-8) // 8 + 1)
    for rank in ranks:
        bits[rank // 8] |= 1 << rank % 8
    return bytes(bits)


def ranks_from_bits(bits: bytes, field: str) -> frozenset[int]:
    if len(bits) > MAX_GROUP_WORLD_SIZE // 8:
        raise InvalidRequest(f"has {len(bits)} bytes; a group has at most {MAX_GROUP_WORLD_SIZE} ranks", field=field)
    return frozenset(8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)
