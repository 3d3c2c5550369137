"""Memory in which a supervisor keeps the states of its ranks while they are dead.

A *buffer* is a memfd of the supervisor. It holds one state: a header of fixed size, then the encoded state. A rank
opens the buffers under /proc/PID/fd, so the memory is freed when the supervisor and its ranks have exited, however they
exit.

A rank has two buffers and writes them in turn. It erases the header first and writes it last, so a buffer that was
being written when the rank was killed is empty, and the other one is complete.
"""

import json
import os
import struct
from dataclasses import asdict, dataclass

from xxhash import xxh3_64_intdigest

BUFFERS = 2
"""Number of buffers per rank."""
HEADER_BYTES = 4096
_MAGIC = b"LHKEEP1\n"
_PREFIX = struct.Struct(">8sIQ")  # magic, length of the JSON, its XXH3


@dataclass(frozen=True, slots=True)
class BufferHeader:
    owner: str  # rank that wrote the buffer (agent_client/step/environment.py)
    step: int = 0
    quorum_id: int = 0
    length: int = 0  # bytes of the state
    digest: str = ""  # XXH3 of the state
    problem: str = ""  # why the state of this step was not kept; `length` is then 0


def make_buffer(name: str) -> int:
    return os.memfd_create(f"lighthouse-{name}", os.MFD_CLOEXEC)


def buffer_path(descriptor: int) -> str:
    """Return the path under which this user's other processes can open the buffer `descriptor` of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def read_header(descriptor: int) -> BufferHeader | None:
    """Return a buffer's header, or None if the buffer is empty, damaged or shorter than its header says."""
    block = os.pread(descriptor, HEADER_BYTES, 0)
    if len(block) < HEADER_BYTES:
        return None
    magic, length, checksum = _PREFIX.unpack_from(block)
    text = block[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(text) < length or xxh3_64_intdigest(text) != checksum:
        return None
    try:
        header = BufferHeader(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return header if os.fstat(descriptor).st_size >= HEADER_BYTES + header.length else None


def write_header(descriptor: int, header: BufferHeader | None) -> None:
    """Write a buffer's header, or erase it if `header` is None."""
    block = b""
    if header is not None:
        text = json.dumps(asdict(header), ensure_ascii=False).encode()
        block = _PREFIX.pack(_MAGIC, len(text), xxh3_64_intdigest(text)) + text
    if len(block) > HEADER_BYTES:
        raise ValueError(f"a header of {len(block)} bytes does not fit into {HEADER_BYTES}")
    os.pwrite(descriptor, block.ljust(HEADER_BYTES, b"\0"), 0)
