"""The ranks of a job on the wire; there and back is in test_session_wire.py and test_wire.py."""

import pytest

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.membership import MAX_PENDING_NAMED, World
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codecs import WORLD
from lighthouse_protocol.wire.rank_set import ranks_from_bits, ranks_to_bits


@pytest.mark.parametrize(
    ("ranks", "bits"),
    [((), b""), ((0,), b"\x01"), ((4, 5, 6, 7), b"\xf0"), ((8,), b"\x00\x01"), ((1, 15), b"\x02\x80")],
)
def test_a_bit_for_each_rank(ranks: tuple[int, ...], bits: bytes):
    assert ranks_to_bits(frozenset(ranks)) == bits
    assert ranks_from_bits(bits, "missing") == frozenset(ranks)


def test_the_largest_group_fits_a_message():
    everyone = frozenset(range(MAX_GROUP_WORLD_SIZE))
    bits = ranks_to_bits(everyone)
    assert len(bits) == 8192
    assert ranks_from_bits(bits, "missing") == everyone


def test_more_ranks_than_a_group_can_have_are_refused():
    with pytest.raises(InvalidRequest, match="missing: has 8193 bytes"):
        ranks_from_bits(bytes(8193), "missing")


def test_of_many_who_ask_the_first_are_named():
    names = tuple(f"g{number}" for number in range(100))
    assert WORLD.read(WORLD.write(World(1, 1, peers_pending=100, pending=names))) == World(
        1, 1, peers_pending=100, pending=names[:MAX_PENDING_NAMED]
    )


@pytest.mark.parametrize("field", ["global_world_size", "ranks_pending", "peers_pending"])
def test_what_counts_is_not_below_zero(field: str):
    with pytest.raises(InvalidRequest, match=f"{field}: is -1"):
        WORLD.read(lighthouse_pb2.World(**{field: -1}))
