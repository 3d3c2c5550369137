"""The header of a buffer: whatever is there, it is complete or it is nothing."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_REASON_CHARS
from lighthouse_runtime.process.kept_memory import HEADER_BYTES, BufferHeader, make_buffer, read_header, write_header

HEADER = BufferHeader('["job", "ä", "f00d", 0, 1]', 12, 34, 100, "0123456789abcdef")


@pytest.fixture
def buffer() -> Iterator[int]:
    it = make_buffer("test")
    yield it
    os.close(it)


def test_there_and_back(buffer: int) -> None:
    assert read_header(buffer) is None
    write_header(buffer, HEADER)
    assert read_header(buffer) is None, "the state is not there yet"
    os.ftruncate(buffer, HEADER_BYTES + HEADER.length)
    assert read_header(buffer) == HEADER
    write_header(buffer, None)
    assert read_header(buffer) is None


def test_a_problem_of_the_greatest_length_fits(buffer: int) -> None:
    header = BufferHeader(HEADER.owner, problem="\u5b57" * MAX_REASON_CHARS)
    write_header(buffer, header)
    assert read_header(buffer) == header


def test_a_header_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="does not fit into 4096"):
        write_header(buffer, BufferHeader("x" * HEADER_BYTES))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=HEADER_BYTES), at=st.integers(0, HEADER_BYTES - 1))
def test_anything_else_is_no_header(buffer: int, content: bytes, at: int) -> None:
    os.ftruncate(buffer, HEADER_BYTES + HEADER.length)
    write_header(buffer, HEADER)
    before = os.pread(buffer, HEADER_BYTES, 0)
    os.pwrite(buffer, content[: HEADER_BYTES - at], at)
    used = len(before.rstrip(b"\0"))
    is_same = os.pread(buffer, used, 0) == before[:used]
    assert read_header(buffer) == (HEADER if is_same else None)
