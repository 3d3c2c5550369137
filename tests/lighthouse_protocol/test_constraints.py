"""Constraints whose words or bytes matter; that fields are checked is in wire/test_messages.py."""

import pytest

from lighthouse_protocol.constraints import EntryCount, IntRange, check_age, check_count, ranks_from_bits, ranks_to_bits
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest


@pytest.mark.parametrize(
    ("check", "value", "refusal"),
    [
        (check_count, -1, "step: is -1; it counts from 0 to 9007199254740992"),
        (check_age, -1.0, "step: is -1.0; it is a number of seconds from 0 to 1e+10"),
        (IntRange(1, 65535, "ports are"), 0, "step: is 0; ports are 1 to 65535"),
        (EntryCount(3), "abcd", "step: has 4 entries; 0 to 3 are allowed"),
    ],
)
def test_a_refusal_says_what_is_allowed(check: object, value: object, refusal: str):
    with pytest.raises(InvalidRequest) as refused:
        check(value, "step")  # type: ignore[operator]
    assert str(refused.value) == refusal


@pytest.mark.parametrize(
    ("ranks", "bits"),
    [((), b""), ((0,), b"\x01"), ((4, 5, 6, 7), b"\xf0"), ((8,), b"\x00\x01"), ((1, 15), b"\x02\x80")],
)
def test_a_bit_for_each_rank(ranks: tuple[int, ...], bits: bytes):
    assert ranks_to_bits(frozenset(ranks)) == bits
    assert ranks_from_bits(bits, "missing") == frozenset(ranks)


def test_the_largest_group_fits():
    everyone = frozenset(range(MAX_GROUP_WORLD_SIZE))
    bits = ranks_to_bits(everyone)
    assert (len(bits), ranks_from_bits(bits, "missing")) == (8192, everyone)
