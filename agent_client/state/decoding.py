"""The bytes of a state: streamed, checksummed, without pickle.

    magic (8 bytes) · version (u32) · header length (u64) · crc32 of all that and of the header (u32)   big endian
    header: JSON {"tree": skeleton, "blobs": [[dtype, shape, bytes], ...]}; dtype "bytes" for bytes
    per blob: its bytes, row-major and in the byte order of the host, in pieces of 4 MiB · crc32 of each (u32)

The length is known before the first byte is sent, and no tensor is allocated before the header has proved consistent.
A stream can begin at any byte (encoding.py), so a transfer that breaks off goes on where it broke.
Checksums find accidents, not attackers; what stops an attacker is that nothing here can name code.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agent_client.state.encoding import (
    MAGIC,
    MAX_HEADER_BYTES,
    PIECE_BYTES,
    PREFIX,
    VERSION,
    Encoding,
    encode,
    encoded_size,
)
from agent_client.state.reader import CHECKSUM, CHUNK_BYTES, Reader, Source, TruncatedState
from agent_client.state.tree import DTYPES, MAX_DIMENSIONS, Blob, CorruptState, Json, State, assemble

__all__ = ["CHUNK_BYTES", "MAX_HEADER_BYTES", "CorruptState", "Encoding", "TruncatedState", "decode", "encode"]

_MAX_BLOB_BYTES = 2**62


def decode(
    source: Source,
    length: int | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    max_header_bytes: int = MAX_HEADER_BYTES,
    expect: Callable[[State], object] | None = None,
) -> State:
    """The state whose encoding `source` yields, its tensors on the CPU; CorruptState for anything else.

    `length`: bytes that were announced; exactly so many are read. Without it the source must end with the state.
    `expect` gets the layout of the state before any blob is read: its tensors on the meta device, its bytes empty. What
    it raises ends the decoding.
    """
    reader = Reader(source, chunk_bytes)
    header = _read_header(reader, max_header_bytes)
    skeleton, described = _check_header(header)
    _check_length(reader.consumed + sum(encoded_size(blob.bytes) for blob in described), length)
    if expect is not None:
        expect(assemble(skeleton, [_lay_out(blob, index) for index, blob in enumerate(described)]))
    blobs = [_read_blob(reader, blob, index) for index, blob in enumerate(described)]
    if length is None:
        reader.expect_end()
    return assemble(skeleton, blobs)


@dataclass(frozen=True, slots=True)
class _Described:
    """What a header says about one blob, checked."""

    dtype: torch.dtype | None
    """None: bytes."""
    shape: tuple[int, ...]
    bytes: int


def _read_header(reader: Reader, max_header_bytes: int) -> bytes:
    prefix, checksum = reader.take(PREFIX.size)
    magic, version, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CorruptState(f"this is no state of a host of this byte order: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CorruptState(f"the state has format version {version}, this side reads {VERSION}: run the same release")
    if length > max_header_bytes:
        raise CorruptState(f"the state announces a header of {length} bytes, more than {max_header_bytes}")
    sent, _ = reader.take(CHECKSUM.size)
    header, checksum = reader.take(length, checksum)
    if CHECKSUM.unpack(sent)[0] != checksum:
        raise CorruptState("the checksum of the header is wrong: its bytes were damaged on the way")
    return header


def _check_header(header: bytes) -> tuple[Json, list[_Described]]:
    try:
        parsed = json.loads(header.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptState(f"the header of the state is not the JSON it should be: {error}") from error
    match parsed:
        case {"tree": tree, "blobs": [*blobs]}:
            return tree, [_check_described(entry, index) for index, entry in enumerate(blobs)]
        case _:
            raise CorruptState("the header of the state lacks its tree or its blobs")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_described(entry: Json, index: int) -> _Described:
    match entry:
        case [str() as name, [*shape], int() as size] if len(shape) <= MAX_DIMENSIONS and _are_sizes([*shape, size]):
            dtype, itemsize = _dtype(name)
        case _:
            raise CorruptState(f"blob {index} is not described by a dtype, a shape and a length")
    if math.prod(shape) * itemsize != size or (dtype is None and len(shape) != 1):
        raise CorruptState(f"blob {index}: {name} of shape {shape} does not take {size} bytes")
    return _Described(dtype, tuple(shape), size)


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= _MAX_BLOB_BYTES for value in values)


def _dtype(name: str) -> tuple[torch.dtype | None, int]:
    if name == "bytes":
        return None, 1
    if (dtype := DTYPES.get(name)) is None:
        raise CorruptState(f"torch {torch.__version__} has no dtype {name[:40]!r}: run the same torch on both sides")
    return dtype, dtype.itemsize


def _check_length(described: int, announced: int | None) -> None:
    if announced is not None and described != announced:
        raise CorruptState(f"the header describes {described} bytes, but {announced} were announced")


def _lay_out(blob: _Described, index: int) -> Blob:
    if blob.dtype is None:
        return b""
    try:
        return torch.empty(blob.shape, dtype=blob.dtype, device="meta")
    except RuntimeError as error:
        raise CorruptState(f"blob {index} cannot have the shape {blob.shape}") from error


def _read_blob(reader: Reader, blob: _Described, index: int) -> Blob:
    raw = _allocate(blob.bytes, index)
    view = raw.numpy().data
    for first in range(0, max(blob.bytes, 1), PIECE_BYTES):
        reader.check(reader.fill(view[first : first + PIECE_BYTES]), f"blob {index}")
    if blob.dtype is None:
        return view.tobytes()
    try:
        return raw.view(blob.dtype).reshape(blob.shape)
    except RuntimeError as error:
        raise CorruptState(f"blob {index} cannot have the shape {blob.shape}") from error


def _allocate(size: int, index: int) -> torch.Tensor:
    """`size` bytes; the system commits them only as they are filled."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise CorruptState(f"blob {index} is announced with {size} bytes, which this host cannot allocate") from error
