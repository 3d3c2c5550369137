"""to_wire / from_wire of what is said of the ranks of a job: the world, and which ranks of a group are missing.

Readers raise InvalidRequest that names the field.
"""

from collections.abc import Collection

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, cut_reason
from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.fields import check_count

MAX_PENDING_NAMED = 16


def world_to_wire(world: World) -> lighthouse_pb2.World:
    return lighthouse_pb2.World(
        global_world_size=world.global_world_size,
        largest_peer_group_world_size=world.largest_peer_group_world_size,
        ranks_pending=world.ranks_pending,
        group_world_size=world.group_world_size,
        peers_pending=world.peers_pending,
        pending=world.pending[:MAX_PENDING_NAMED],
        waiting_for=cut_reason(world.waiting_for),
    )


def world_from_wire(message: lighthouse_pb2.World) -> World:
    return World(
        global_world_size=check_count(message.global_world_size, "global_world_size"),
        largest_peer_group_world_size=check_count(
            message.largest_peer_group_world_size, "largest_peer_group_world_size"
        ),
        ranks_pending=check_count(message.ranks_pending, "ranks_pending"),
        group_world_size=check_count(message.group_world_size, "group_world_size"),
        peers_pending=check_count(message.peers_pending, "peers_pending"),
        pending=tuple(check_name(name, "pending") for name in message.pending[:MAX_PENDING_NAMED]),
        waiting_for=cut_reason(message.waiting_for),
    )


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
