"""The header of a slot: whatever is there, it is complete or it is nothing."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse_runtime.process.slots import HEADER_BYTES, SlotHeader, make_slot, read_header, write_header

HEADER = SlotHeader('["job", "ä", "f00d", 0, 1]', 12, 34, 100, "0123456789abcdef")


@pytest.fixture
def slot() -> Iterator[int]:
    it = make_slot("test")
    yield it
    os.close(it)


def test_there_and_back(slot: int) -> None:
    assert read_header(slot) is None
    write_header(slot, HEADER)
    assert read_header(slot) is None, "the state is not there yet"
    os.ftruncate(slot, HEADER_BYTES + HEADER.length)
    assert read_header(slot) == HEADER
    write_header(slot, None)
    assert read_header(slot) is None


def test_a_header_that_does_not_fit_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match="does not fit into 4096"):
        write_header(slot, SlotHeader("x" * HEADER_BYTES))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=HEADER_BYTES), at=st.integers(0, HEADER_BYTES - 1))
def test_anything_else_is_no_header(slot: int, content: bytes, at: int) -> None:
    os.ftruncate(slot, HEADER_BYTES + HEADER.length)
    write_header(slot, HEADER)
    before = os.pread(slot, HEADER_BYTES, 0)
    os.pwrite(slot, content[: HEADER_BYTES - at], at)
    used = len(before.rstrip(b"\0"))
    is_same = os.pread(slot, used, 0) == before[:used]
    assert read_header(slot) == (HEADER if is_same else None)
