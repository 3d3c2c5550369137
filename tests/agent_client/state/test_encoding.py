"""A stream of a state can begin at any byte, and takes no copy of what it sends."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.state import codec
from agent_client.state.codec import (
    CHECKSUM_BYTES,
    PIECE_BYTES,
    allocate,
    decode,
    encode,
    layout_digest,
    piece_views,
    read_head,
)
from agent_client.state.tree import CorruptState, assemble
from tests.agent_client.state.trees import encoded, resident_bytes, same, trees

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
MIB = 2**20


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PIECE_BYTES", 7)


@pytest.mark.usefixtures("small_pieces")
class TestSmallPieces:
    @settings(max_examples=200)
    @given(trees, st.integers(1, 20), st.data())
    def test_any_range_of_bytes(self, state: Any, chunk_bytes: int, data: st.DataObject) -> None:
        encoding = encode(state, chunk_bytes=chunk_bytes)
        content = b"".join(encoding)
        assert len(content) == encoding.length
        body = content[len(encoding.head) :]
        start = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(start, len(body)))
        assert b"".join(encoding.stripe(start, stop)) == body[start:stop]
        assert same(decode(content), state)

    @settings(max_examples=200)
    @given(trees, st.integers(1, 20))
    def test_pieces_and_head_make_up_the_state(self, state: Any, chunk_bytes: int) -> None:
        it = encode(state, chunk_bytes=chunk_bytes)
        head = read_head(io.BytesIO(b"".join(it)))
        assert (head.size, head.length) == (len(it.head), it.length)
        assert layout_digest(head.layouts) == it.layout
        tensors, position = allocate(head.layouts), 0
        places = list(piece_views(tensors))
        assert len(places) == it.pieces
        for place, checksum in zip(places, it.checksums(), strict=True):
            piece = b"".join(it.stripe(position, position + len(place) + CHECKSUM_BYTES))
            assert piece[len(place) :] == checksum
            place[:] = piece[: len(place)]
            position += len(piece)
        assert len(it.head) + position == it.length
        assert same(assemble(head.skeleton, tensors), state)

    def test_each_piece_has_its_checksum(self) -> None:
        content = encoded(bytes(20), chunk_bytes=3)
        for at in range(len(content) - 20 - 3 * 4, len(content)):
            damaged = bytearray(content)
            damaged[at] ^= 1
            with pytest.raises(CorruptState, match="checksum of piece"):
                decode(bytes(damaged))


def test_the_rest_of_a_large_tensor_is_found_without_reading_what_lies_before() -> None:
    state = torch.arange(3 * PIECE_BYTES // 8 + 5)
    encoding = encode(state, chunk_bytes=MIB)
    body = b"".join(encoding)[len(encoding.head) :]
    for start in (PIECE_BYTES, 2 * PIECE_BYTES + 4321, len(body) - 5, len(body) - 4, len(body)):
        assert b"".join(encoding.stripe(start, len(body))) == body[start:]


@pytest.mark.parametrize("layout", ["transposed", "lazily conjugated", "expanded"])
def test_what_is_not_contiguous_is_copied_a_piece_at_a_time(layout: str) -> None:
    tensor = {
        "transposed": lambda: torch.ones(4096, 4096).t(),
        "lazily conjugated": lambda: torch.ones(2048, 4096, dtype=torch.complex64).conj(),
        "expanded": lambda: torch.ones(4096, 1).expand(4096, 4096),
    }[layout]()
    size = tensor.numel() * tensor.itemsize
    assert size == 64 * MIB
    list(encode(torch.ones(10, 10).t()))  # what is loaded when first used
    before, peak = resident_bytes(), 0
    for _ in encode(tensor):
        peak = max(peak, resident_bytes())
    assert peak - before < size / 2
