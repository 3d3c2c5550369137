"""An exit status in words."""

import signal
from collections import deque


def described(status: int) -> str:
    """For people: exit code 1, SIGSEGV."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name} (kill -9, or the kernel was out of memory)" if name == "SIGKILL" else name


# -- output -------------------------------------------------------------------
#
# What ranks write: cut into lines, prefixed, and the last of it kept to show why a rank died. No I/O.

TAIL_LINES = 20
MAX_LINE_BYTES = 4096
MAX_TAIL_CHARS = 400
PIECE_BYTES = 4096  # a pipe that has room takes so much without blocking


class Lines:
    """Bytes in, whole lines out; a line that does not end is cut at MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._rest = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        self._tail.extend(line for line in lines if line.strip())
        return lines

    def end(self) -> list[bytes]:
        """What was written without a line end."""
        return self.feed(b"\n") if self._rest else []

    @property
    def tail(self) -> list[str]:
        """The last lines that are not empty, as text that is safe to show."""
        return [_shown(line) for line in self._tail]

    @property
    def so_far(self) -> list[str]:
        """The same with a line that has not ended yet: a progress bar, say."""
        rest = [_shown(self._rest)] if self._rest.strip() else []
        return [*self.tail, *rest][-TAIL_LINES:]


class Outlet:
    """Lines that wait for their reader: taken in pieces that a pipe with room takes at once."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._queue: deque[bytes] = deque()
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._limit_bytes

    @property
    def has_some(self) -> bool:
        return bool(self._queue)

    def put(self, prefix: str, lines: list[bytes]) -> None:
        for line in lines:
            whole = prefix.encode() + line + b"\n"
            self._queue.append(whole)
            self._bytes += len(whole)

    def piece(self) -> bytes:
        """Whole lines, if they fit; nothing is taken away until taken()."""
        piece = b""
        for line in self._queue:
            if piece and len(piece) + len(line) > PIECE_BYTES:
                break
            piece += line
        return piece[:PIECE_BYTES]

    def taken(self, count: int) -> None:
        self._bytes -= count
        while count:
            line = self._queue.popleft()
            if len(line) > count:
                self._queue.appendleft(line[count:])
                return
            count -= len(line)


def _shown(line: bytes) -> str:
    """Of what is written over itself, the last."""
    text = (line.rstrip(b"\r").rpartition(b"\r")[2] or line).decode(errors="replace").expandtabs(4)[:MAX_TAIL_CHARS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
