"""The sender's side of decoding.py: a state as a stream of bytes that can begin anywhere, without a copy of it."""

import json
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch
from xxhash import xxh3_64, xxh3_128_hexdigest

from agent_client.state.host_memory import in_memory_order, is_dense, kept_strides
from agent_client.state.tree import Json, State, disassemble

MAGIC = b"LHSTATE" + (b"<" if sys.byteorder == "little" else b">")
VERSION = 5
MAX_HEADER_BYTES = 64 * 2**20
CHUNK_BYTES = 2**19
"""How much is copied before it goes into the checksum: so much stays in a core's cache meanwhile."""
PIECE_BYTES = 4 * 2**20
"""How much of a tensor one checksum covers."""
PREFIX = struct.Struct(">8sIQ")
CHECKSUM_BYTES = 8
"""XXH3 with 64 bits: a CRC would take longer than the transfer over a fast network."""


class Encoding:
    """A state as chunks of bytes: read it as often as needed, from several threads at once too.

    It holds the tensors themselves: change none of them while it is read. Chunks of tensors on the CPU are views; what
    is elsewhere, or not contiguous, is copied a piece at a time.
    """

    def __init__(self, state: State, chunk_bytes: int = CHUNK_BYTES) -> None:
        skeleton, tensors = disassemble(state)
        self.head = _encode_head(skeleton, tensors)
        """All but the tensors."""
        self._chunk_bytes = chunk_bytes
        self._tensors = [in_memory_order(tensor.detach()) for tensor in tensors]
        self._starts = list(accumulate(map(encoded_size, self._tensors), initial=len(self.head)))
        self.length = self._starts[-1]
        """Bytes in all."""
        self.body_length = self.length - len(self.head)
        """Of what follows the head."""
        self.pieces = sum(map(count_pieces, self._tensors))
        self.layout = layout_digest(tensors)
        self._checksums: dict[int, bytes] = {}

    def __iter__(self) -> Iterator[memoryview]:
        return self.chunks(0)

    def chunks(self, start: int) -> Iterator[memoryview]:
        """All from byte `start` on; what lies before is not read, but for the beginning of one piece."""
        if start < len(self.head):
            yield memoryview(self.head)[start:]
        first = max(0, bisect_right(self._starts, start) - 1)
        for position, tensor in zip(self._starts[first:], self._tensors[first:], strict=False):
            yield from self._tensor(tensor.detach(), max(0, start - position))

    def stripe(self, start: int, stop: int) -> Iterator[memoryview]:
        """From `start` to `stop`, both counted from the end of the head."""
        left = stop - start
        chunks = self.chunks(len(self.head) + start) if left > 0 else iter(())
        for chunk in chunks:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                return

    def checksums(self) -> Iterator[bytes]:
        """Of each piece, in order. Each is reckoned once, however many readers there are."""
        begins = ((it, first) for it in self._tensors for first in range(0, max(it.nbytes, 1), PIECE_BYTES))
        for piece, (tensor, first) in enumerate(begins):
            if piece not in self._checksums:
                checksum = xxh3_64()
                for chunk in self._split(tensor.detach(), first, min(first + PIECE_BYTES, tensor.nbytes)):
                    checksum.update(chunk)
                self._checksums[piece] = checksum.digest()
            yield self._checksums[piece]

    def _tensor(self, tensor: torch.Tensor, start: int) -> Iterator[memoryview]:
        skipped, within = divmod(start, PIECE_BYTES + CHECKSUM_BYTES)
        for first in range(skipped * PIECE_BYTES, max(tensor.nbytes, 1), PIECE_BYTES):
            yield from self._piece(tensor, first, min(first + PIECE_BYTES, tensor.nbytes), within)
            within = 0

    def _piece(self, tensor: torch.Tensor, first: int, last: int, skip: int) -> Iterator[memoryview]:
        checksum = xxh3_64()
        for chunk in self._split(tensor, first, last):
            checksum.update(chunk)
            if skip < len(chunk):
                yield chunk[skip:]
            skip = max(0, skip - len(chunk))
        yield memoryview(checksum.digest())[skip:]

    def _split(self, tensor: torch.Tensor, first: int, last: int) -> Iterator[memoryview]:
        for view in _raw(tensor, first, last):
            for start in range(0, len(view), self._chunk_bytes):
                yield view[start : start + self._chunk_bytes]


def encode(state: State, *, chunk_bytes: int = CHUNK_BYTES) -> Encoding:
    """TypeError or ValueError, with the path, for what a state cannot hold (see tree.py)."""
    return Encoding(state, chunk_bytes)


def encoded_size(tensor: torch.Tensor) -> int:
    """In bytes, with the checksum of each piece; an empty tensor is one empty piece."""
    return tensor.nbytes + count_pieces(tensor) * CHECKSUM_BYTES


def count_pieces(tensor: torch.Tensor) -> int:
    return max(1, -(-tensor.nbytes // PIECE_BYTES))


def layout_digest(tensors: Sequence[torch.Tensor]) -> str:
    """Two states with the same one have their pieces at the same places."""
    return xxh3_128_hexdigest(json.dumps(_describe(tensors)).encode())


def _describe(tensors: Sequence[torch.Tensor]) -> list[tuple[str | Sequence[int], ...]]:
    return [(str(tensor.dtype).removeprefix("torch."), tensor.shape, *_strides(tensor)) for tensor in tensors]


def _strides(tensor: torch.Tensor) -> list[Sequence[int]]:
    """Those of a copy, unless they are the row-major ones."""
    strides = kept_strides(tensor)
    return [strides] if strides != row_major_strides(tensor.shape) and tensor.numel() else []


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(reversed([*shape, 1][1:]), mul))[::-1]


def _encode_head(skeleton: Json, tensors: Sequence[torch.Tensor]) -> bytes:
    header_json = {"tree": skeleton, "tensors": _describe(tensors)}
    header = json.dumps(header_json, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"everything but tensors and bytes makes a header of {len(header)} bytes, more than {MAX_HEADER_BYTES}: "
            "keep long lists of numbers in tensors"
        )
    prefix = PREFIX.pack(MAGIC, VERSION, len(header))
    return prefix + xxh3_64(prefix + header).digest() + header


def _raw(tensor: torch.Tensor, first: int, last: int) -> Iterator[memoryview]:
    """The bytes from `first` to `last`, at most one piece, in row-major order (of `in_memory_order`).

    Of a tensor that is not contiguous no more than a piece is ever copied.
    """
    if first == last:
        return
    if is_dense(tensor):
        # not reshape: a tensor of one element is contiguous whatever its strides, and view() insists on 1
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        yield flat[first:last].cpu().numpy().data
        return
    if tensor.dim() == 0:
        tensor = tensor.unsqueeze(0)
    row = tensor.nbytes // len(tensor)
    rows = range(first // row, -(-last // row))
    if row <= PIECE_BYTES:
        dense = tensor[rows.start : rows.stop].contiguous().resolve_conj().resolve_neg()
        yield from _raw(dense, first - rows.start * row, last - rows.start * row)
        return
    for at in rows:
        yield from _raw(tensor[at], max(0, first - at * row), min(row, last - at * row))
