"""An exit status in words."""

import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


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


# -- python command -----------------------------------------------------------
#
# A command that runs Python, cut where its script or module begins. No I/O.

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_FLAGS = frozenset("bBdEIOPqsSuv")
_WITH_VALUE = frozenset("WX")


class NoPython(ValueError):
    """The message says what the command is instead."""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """`interpreter`: the program and its own options. `program`: a script or `-m` and a module, and their arguments."""

    interpreter: tuple[str, ...]
    program: tuple[str, ...]


def read_python(command: Sequence[str]) -> PythonCommand:
    """Raises NoPython."""
    if not _INTERPRETER.fullmatch(command[0].rpartition("/")[2]):
        raise NoPython(f"{command[0]} is not a Python interpreter")
    words = list(command[1:])
    own = [command[0]]
    while words and words[0].startswith("-") and words[0] != "-":
        taken, module = _option(words)
        if module is not None:
            flags = [f"-{module.flags}"] if module.flags else []
            return PythonCommand((*own, *flags), ("-m", module.name, *words[taken:]))
        own += words[:taken]
        words = words[taken:]
    if not words or words[0] == "-":
        raise NoPython(f"{command[0]} has neither a script nor -m MODULE")
    return PythonCommand(tuple(own), tuple(words))


@dataclass(frozen=True, slots=True)
class _Module:
    """`flags` stand before the m in the same word, as in -um."""

    name: str
    flags: str


def _option(words: Sequence[str]) -> tuple[int, _Module | None]:
    """How many words the first option takes, and the module that it names."""
    letters = words[0][1:]
    for index, letter in enumerate(letters):
        rest = letters[index + 1 :]
        taken = 1 if rest else 2
        if letter in _FLAGS:
            continue
        if letter not in _WITH_VALUE | {"m"}:
            raise NoPython(f"the interpreter's option {words[0]} is not possible here")
        if taken > len(words):
            raise NoPython(f"{words[0]} lacks its value")
        if letter == "m":
            return taken, _Module(rest or words[1], letters[:index])
        return taken, None
    return 1, None
