"""Reading what a peer sends: every byte counted and checksummed, no memory for bytes that have not arrived."""

import struct
import zlib
from typing import Protocol

from agent_client.state.tree import CorruptState

CHUNK_BYTES = 4 * 2**20
CHECKSUM = struct.Struct(">I")


class Source(Protocol):
    """Anything that fills a buffer: BytesIO, an HTTP response, an open file. 0 or None is the end."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class TruncatedState(CorruptState):
    """The bytes ended before the state did."""


class Reader:
    def __init__(self, source: Source, chunk_bytes: int) -> None:
        self._source = source
        self._chunk_bytes = chunk_bytes
        self.consumed = 0

    def fill(self, buffer: memoryview, checksum: int = 0) -> int:
        """Fill `buffer` to its end; the crc32 of it."""
        filled = 0
        while filled < len(buffer):
            count = self._source.readinto(buffer[filled : filled + self._chunk_bytes])
            if not count:
                raise TruncatedState(f"the state breaks off after {self.consumed} bytes")
            checksum = zlib.crc32(buffer[filled : filled + count], checksum)
            filled += count
            self.consumed += count
        return checksum

    def take(self, count: int, checksum: int = 0) -> tuple[bytes, int]:
        """`count` bytes and their crc32; never holds much more than what has arrived."""
        pieces: list[bytes] = []
        while count:
            piece = bytearray(min(count, self._chunk_bytes))
            checksum = self.fill(memoryview(piece), checksum)
            pieces.append(bytes(piece))
            count -= len(piece)
        return b"".join(pieces), checksum

    def check(self, checksum: int, what: str) -> None:
        """Read the checksum that was sent and compare it."""
        if CHECKSUM.unpack(self.take(CHECKSUM.size)[0])[0] != checksum:
            raise CorruptState(f"the checksum of {what} is wrong: damaged on the way, or changed while it was sent")

    def expect_end(self) -> None:
        if self._source.readinto(memoryview(bytearray(1))):
            raise CorruptState(f"the state ends after {self.consumed} bytes, but more follow")
