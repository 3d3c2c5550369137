"""Encodes a state as a stream of bytes: checksummed, without pickle, and readable from any position.

    magic (8 bytes) · version (u32) · header length (u64) · XXH3 of these three and the header (u64)   big endian
    header: JSON {"tree": skeleton, "tensors": [[dtype, shape], ...]}, with strides unless they are row-major
    each tensor: its bytes, in memory order and the host's byte order, in pieces of 4 MiB · XXH3 of each piece (u64)

The sender knows the length before it sends the first byte, can send any range of bytes, and does not copy the state.
The receiver allocates no tensor before it has validated the header. The checksums detect only accidental corruption. A
malicious stream cannot execute code, because no value refers to code.
"""

import io
import json
import struct
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from xxhash import xxh3_64, xxh3_128_hexdigest

from agent_client.state.snapshot import empty_bytes, has_no_gaps, in_memory_order, kept_strides
from agent_client.state.tree import DTYPES, MAX_DIMENSIONS, CorruptState, Json, State, assemble, disassemble

MAGIC = b"LHSTATE" + (b"<" if sys.byteorder == "little" else b">")
VERSION = 5
MAX_HEADER_BYTES = 64 * 2**20
CHUNK_BYTES = 2**19
"""Number of bytes that are copied and checksummed at a time. They fit into the CPU cache."""
PIECE_BYTES = 4 * 2**20
"""Number of tensor bytes per checksum."""
PREFIX = struct.Struct(">8sIQ")
CHECKSUM_BYTES = 8
"""Size of a 64-bit XXH3. Over a fast network, computing a CRC would take longer than the transfer."""


class Encoding:
    """An encoded state. Iterating yields its bytes in chunks. Several threads may do so at the same time, repeatedly.

    The tensors must not change while they are read. A chunk of a contiguous CPU tensor is a view. Other tensors are
    copied one piece at a time.
    """

    def __init__(self, state: State, chunk_bytes: int = CHUNK_BYTES) -> None:
        skeleton, tensors = disassemble(state)
        self.head = _encode_head(skeleton, tensors)
        self._chunk_bytes = chunk_bytes
        ordered = [in_memory_order(tensor.detach()) for tensor in tensors]
        self._pieces = [(it, first) for it in ordered for first in range(0, max(it.nbytes, 1), PIECE_BYTES)]
        sizes = (min(PIECE_BYTES, tensor.nbytes - first) + CHECKSUM_BYTES for tensor, first in self._pieces)
        self._starts = list(accumulate(sizes, initial=0))
        self.pieces = len(self._pieces)
        self.body_length = self._starts[-1]
        self.length = len(self.head) + self.body_length
        self.layout = layout_digest(tensors)
        self._checksums: dict[int, bytes] = {}

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.head)
        yield from self.stripe(0, self.body_length)

    def stripe(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop` (exclusive) of the body, which is everything after the head."""
        for piece in range(bisect_right(self._starts, start) - 1, self.pieces):
            at = self._starts[piece]
            for chunk in self._piece(piece):
                if at + len(chunk) > start:
                    yield chunk[max(0, start - at) : stop - at]
                at += len(chunk)
                if at >= stop:
                    return

    def checksums(self) -> Iterator[bytes]:
        for piece in range(self.pieces):
            if piece not in self._checksums:
                deque(self._piece(piece), maxlen=0)
            yield self._checksums[piece]

    def _piece(self, piece: int) -> Iterator[memoryview]:
        """Yield the chunks of a piece, and then its checksum, which is computed only once."""
        tensor, first = self._pieces[piece]
        known, checksum = self._checksums.get(piece), xxh3_64()
        for view in _raw(tensor, first, min(first + PIECE_BYTES, tensor.nbytes)):
            for start in range(0, len(view), self._chunk_bytes):
                chunk = view[start : start + self._chunk_bytes]
                if known is None:
                    checksum.update(chunk)
                yield chunk
        if known is None:
            known = self._checksums[piece] = checksum.digest()
        yield memoryview(known)


def encode(state: State, *, chunk_bytes: int = CHUNK_BYTES) -> Encoding:
    """Encode a state. Its tensors are read in chunks of at most `chunk_bytes` bytes.

    Raises:
        TypeError, ValueError: An entry cannot be encoded (see tree.py). The message contains its path.
    """
    return Encoding(state, chunk_bytes)


def encoded_size(tensor: torch.Tensor) -> int:
    """Return the encoded size of a tensor in bytes, including its checksums. An empty tensor has one checksum, too."""
    return tensor.nbytes + count_pieces(tensor) * CHECKSUM_BYTES


def count_pieces(tensor: torch.Tensor) -> int:
    return max(1, -(-tensor.nbytes // PIECE_BYTES))


def layout_digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the dtypes, shapes and strides, which determine where each tensor is encoded."""
    return xxh3_128_hexdigest(json.dumps(_describe(tensors)).encode())


def _describe(tensors: Sequence[torch.Tensor]) -> list[tuple[str | Sequence[int], ...]]:
    described: list[tuple[str | Sequence[int], ...]] = []
    for tensor in tensors:
        layout = str(tensor.dtype).removeprefix("torch."), tensor.shape
        strides = kept_strides(tensor)
        row_major = tuple(accumulate(reversed([*tensor.shape, 1][1:]), mul))[::-1]
        described.append((*layout, strides) if strides != row_major and tensor.numel() else layout)
    return described


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
    """Yield the bytes of a tensor in row-major order, from byte `first` to byte `last` (exclusive).

    The range is at most one piece long. If the tensor is not contiguous, the bytes are copied.
    """
    if first == last:
        return
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # Not reshape(): a tensor with one element is contiguous with any strides, but view() requires stride 1.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        yield flat[first:last].cpu().numpy().data
        return
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # older versions of torch cannot copy float4_e2m1fn_x2
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


_MAX_DIMENSION = 2**62
"""Limit of a single dimension. torch itself refuses dimensions whose product is too large."""


class TruncatedState(CorruptState):
    """Raised if the bytes end before the head is complete."""


class Head(NamedTuple):
    """First part of an encoded state: everything except the content of the tensors."""

    skeleton: Json
    layouts: Sequence[torch.Tensor]
    """Shapes and dtypes of the tensors, as tensors on the meta device."""
    size: int

    @property
    def length(self) -> int:
        return self.size + sum(map(encoded_size, self.layouts))


def decode(encoded: bytes) -> State:
    """Decode a state, with its tensors on the CPU. Raise CorruptState if it is damaged or invalid."""
    return decode_from(io.BytesIO(encoded), len(encoded))


def decode_from(source: io.BufferedIOBase, length: int) -> State:
    """Decode a state of `length` bytes, with its tensors on the CPU. Raise CorruptState if it is damaged or invalid."""
    head = read_head(source)
    if head.length != length:
        raise CorruptState(f"the header describes {head.length} bytes, but {length} were received")
    tensors = allocate(head.layouts)
    for number, piece in enumerate(piece_views(tensors)):
        source.readinto(piece)
        if source.read(CHECKSUM_BYTES) != xxh3_64(piece).digest():
            raise CorruptState(f"the checksum of piece {number} is wrong: it was damaged in transit")
    return assemble(head.skeleton, tensors)


def read_head(source: io.BufferedIOBase) -> Head:
    """Read only the head of an encoded state. Raise CorruptState if it is damaged, invalid or of another version."""
    prefix = _read(source, PREFIX.size)
    magic, version, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CorruptState(
            f"this is not a state, or one of another byte order: it starts with {magic!r}, not {MAGIC!r}"
        )
    if version != VERSION:
        raise CorruptState(f"the state has format version {version}, this side reads {VERSION}: run the same release")
    if length > MAX_HEADER_BYTES:
        raise CorruptState(f"the state announces a header of {length} bytes, more than {MAX_HEADER_BYTES}")
    sent = _read(source, CHECKSUM_BYTES)
    header = _read(source, length)
    if sent != xxh3_64(prefix + header).digest():
        raise CorruptState("the checksum of the header is wrong: it was damaged in transit")
    try:
        parsed = json.loads(header.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptState(f"the header of the state is not valid JSON: {error}") from error
    match parsed:
        case {"tree": tree, "tensors": [*tensors]}:
            layouts = [_lay_out(entry, index) for index, entry in enumerate(tensors)]
            return Head(tree, layouts, PREFIX.size + CHECKSUM_BYTES + length)
        case _:
            raise CorruptState("the header of the state lacks its tree or its tensors")


def _read(source: io.BufferedIOBase, count: int) -> bytes:
    """Read exactly `count` bytes. Read them in chunks, because a malicious peer may announce a huge `count`."""
    chunks: list[bytes] = []
    while count:
        chunk = source.read(min(count, CHUNK_BYTES))
        if not chunk:
            raise TruncatedState("the state ends early")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def allocate(layouts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate a CPU tensor for each layout. The system provides memory only as the tensors are written."""
    try:
        return [empty_bytes(it.nbytes).view(it.dtype).as_strided(it.shape, it.stride()) for it in layouts]
    except RuntimeError as error:
        size = sum(layout.nbytes for layout in layouts)
        raise CorruptState(f"tensors of {size} bytes are announced, which this host cannot allocate") from error


def piece_views(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Split tensors returned by `allocate` into pieces of at most PIECE_BYTES, and yield a writable view of each."""
    for tensor in tensors:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        view = flat.view(torch.uint8).numpy().data if tensor.nbytes else memoryview(bytearray())
        for first in range(0, max(len(view), 1), PIECE_BYTES):
            yield view[first : first + PIECE_BYTES]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _lay_out(entry: Json, index: int) -> torch.Tensor:
    match entry:
        case [str() as name, [*shape], *rest] if len(shape) <= MAX_DIMENSIONS and all(map(_is_dimension, shape)):
            if (dtype := DTYPES.get(name)) is None:
                raise CorruptState(
                    f"torch {torch.__version__} has no dtype {name[:40]!r}: run the same torch on both sides"
                )
        case _:
            raise CorruptState(f"tensor {index} is not described by a dtype and a shape")
    try:
        match rest:
            case []:
                return torch.empty(shape, dtype=dtype, device="meta")
            case [[*strides]] if len(strides) == len(shape) and all(map(_is_dimension, strides)):
                if has_no_gaps(shape, strides):
                    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            case _:
                pass
        raise CorruptState(f"tensor {index} has strides that leave gaps, overlap or are malformed")
    except RuntimeError as error:
        raise CorruptState(f"tensor {index} cannot have the shape {shape}") from error


def _is_dimension(value: Json) -> bool:
    return type(value) is int and 0 <= value <= _MAX_DIMENSION
