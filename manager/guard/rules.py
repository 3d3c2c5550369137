"""Exit statuses in words, and the output of ranks. No I/O.

`Lines` cuts a rank's output into lines and retains the last ones, which show why the rank died. `Outlet` is the queue
of prefixed lines for the guard's standard output.
"""

import signal
from collections import deque


def described(status: int) -> str:
    """Describe an exit status for people: "exit code 1" or "SIGSEGV"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name} (kill -9, or the kernel was out of memory)" if name == "SIGKILL" else name


TAIL_LINES = 20
MAX_LINE_BYTES = 4096
MAX_TAIL_CHARS = 400
PIECE_BYTES = 4096  # PIPE_BUF: a writable pipe takes this without blocking


class Lines:
    """Splitter of a byte stream into lines. Unfinished lines are cut at MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._rest = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[bytes]:
        """Add data, and return the lines that are complete now, without their line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        self._tail.extend(line for line in lines if line.strip())
        return lines

    def end(self) -> list[bytes]:
        """Return the unfinished last line, if there is one."""
        return self.feed(b"\n") if self._rest else []

    @property
    def tail(self) -> list[str]:
        """The last non-empty lines, as printable text."""
        return [_shown(line) for line in self._tail]

    @property
    def so_far(self) -> list[str]:
        """The tail with the unfinished line, which may be a progress bar."""
        rest = [_shown(self._rest)] if self._rest.strip() else []
        return [*self.tail, *rest][-TAIL_LINES:]


class Outlet:
    """Queue of output lines, read in pieces that a writable pipe takes without blocking."""

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
        """Return the next piece, of whole lines if they fit. `taken` removes it."""
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
    """Return a line as printable text. If carriage returns overwrite it, return its last version."""
    text = (line.rstrip(b"\r").rpartition(b"\r")[2] or line).decode(errors="replace").expandtabs(4)[:MAX_TAIL_CHARS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
