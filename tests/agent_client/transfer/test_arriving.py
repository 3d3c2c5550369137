"""A state that is still arriving, as others read it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_client.transfer.offers import Arriving

PLACES = [b"first", b"", b"third", b"4"]
SUMS = [b"SUM-%03d!" % number for number in range(4)]
BODY = b"".join(content + checksum for content, checksum in zip(PLACES, SUMS, strict=True))
STARTS = [0, 13, 21, 34, 43]


@pytest.fixture
def arriving() -> Arriving:
    return Arriving("layout", [memoryview(it) for it in PLACES], STARTS)


def read(chunks: Iterator[memoryview]) -> bytes:
    return b"".join(chunks)


@pytest.mark.parametrize(("start", "stop"), [(0, 43), (0, 13), (13, 34), (3, 5), (4, 9), (20, 35), (42, 43), (7, 7)])
def test_any_part_of_it_is_that_of_the_whole(arriving: Arriving, start: int, stop: int) -> None:
    for piece, checksum in enumerate(SUMS):
        arriving.put(piece, checksum)
    arriving.end()
    assert arriving.body_length == len(BODY)
    assert read(arriving.stripe(start, stop)) == BODY[start:stop]


def test_a_piece_is_waited_for(arriving: Arriving) -> None:
    arriving.put(0, SUMS[0])
    chunks = arriving.stripe(0, 21)
    assert [bytes(next(chunks)), bytes(next(chunks))] == [PLACES[0], SUMS[0]]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, chunks)
        assert not waiting.done()
        arriving.put(2, SUMS[2])
        arriving.put(1, SUMS[1])
        assert waiting.result(10) == SUMS[1]


def test_who_waits_is_told_that_nothing_more_comes_and_what_is_here_is_let_go(arriving: Arriving) -> None:
    arriving.put(0, SUMS[0])
    has_begun = threading.Event()

    def wait() -> bytes:
        chunks = arriving.stripe(0, 21)
        has_begun.set()
        return read(chunks)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        has_begun.wait(10)
        arriving.end()
        with pytest.raises(ConnectionError, match="did not arrive"):
            waiting.result(10)
    with pytest.raises(ConnectionError):
        read(arriving.stripe(0, 5))
