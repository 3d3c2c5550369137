"""A process that the guard has started, and its output.

`Child` starts the process, writes its log file and stores its exit status. The guard keeps it until the process and all
its descendants have ended. `Lines` keeps the last lines of the output, which often show why a rank died. `OutputQueue`
holds the prefixed lines for the guard's standard output.
"""

import contextlib
import errno
import io
import os
import signal
import stat
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse_runtime.process.children import die_with_parent
from lighthouse_runtime.process.files import make_private
from manager.guard.process_tree import MARK_VARIABLE

_MAX_ERROR_BYTES = 1 << 16
LOG_WARNED_EVERY_S = 60.0
# How long a process may take to end after SIGKILL. Freeing the memory of a large one takes seconds, and a process that
# waits for a driver or a file system in the kernel does not end at all.
UNKILLABLE_S = 20.0
PASSING_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EFBIG))
"""Errors of a file system that is full or unreachable, but may recover."""


TAIL_LINES = 20  # lines that logs and incidents show
KEPT_LINES = 256  # torchrun's report of a failed rank ends with the traceback of that rank
MAX_LINE_BYTES = 4096
MAX_TAIL_CHARS = 400
PIECE_BYTES = 4096  # PIPE_BUF: a writable pipe accepts this many bytes without blocking


class Lines:
    """Splits a byte stream into lines, and keeps the last ones. Splits an unfinished line at MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._rest = b""
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> list[bytes]:
        """Add data, and return the lines that are now complete, without their newlines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        self._kept.extend(line for line in lines if line.strip())
        return lines

    def end(self) -> list[bytes]:
        """Return the unfinished last line in a list, or an empty list if there is none."""
        return self.feed(b"\n") if self._rest else []

    @property
    def kept(self) -> list[str]:
        """The last KEPT_LINES non-empty lines, as printable text."""
        return [_printable(line) for line in self._kept]

    @property
    def current_tail(self) -> list[str]:
        """The last TAIL_LINES non-empty lines, including the unfinished one, which may be a progress bar."""
        rest = [_printable(self._rest)] if self._rest.strip() else []
        return [*self.kept, *rest][-TAIL_LINES:]


class OutputQueue:
    """Queue of output lines, read in pieces that a writable pipe accepts without blocking."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._queue: deque[bytes] = deque()
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._limit_bytes

    @property
    def has_data(self) -> bool:
        return bool(self._queue)

    def put(self, prefix: str, lines: list[bytes]) -> None:
        for line in lines:
            whole = prefix.encode() + line + b"\n"
            self._queue.append(whole)
            self._bytes += len(whole)

    def next_chunk(self) -> bytes:
        """Return the next piece of at most PIECE_BYTES, made of whole lines if possible. `consume` removes it."""
        piece = b""
        for line in self._queue:
            if piece and len(piece) + len(line) > PIECE_BYTES:
                break
            piece += line
        return piece[:PIECE_BYTES]

    def consume(self, count: int) -> None:
        self._bytes -= count
        while count:
            line = self._queue.popleft()
            if len(line) > count:
                self._queue.appendleft(line[count:])
                return
            count -= len(line)


def _printable(line: bytes) -> str:
    """Return a line as printable text. If it contains carriage returns, return only the text after the last one."""
    text = (line.rstrip(b"\r").rpartition(b"\r")[2] or line).decode(errors="replace").expandtabs(4)[:MAX_TAIL_CHARS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@dataclass(slots=True)
class Child:
    """A process that the guard has started, its output and its exit status."""

    number: int
    label: str
    is_shown: bool
    log_path: str | None
    error_file: Path
    pid: int = 0
    output: int = -1
    log: io.FileIO | None = None
    unlogged_bytes: int = 0  # output lost since the last successful write to the log
    warned_at: float = -LOG_WARNED_EVERY_S
    popen: "subprocess.Popen[bytes] | None" = None  # None until the start
    lines: Lines = field(default_factory=Lines)
    status: int | None = None  # exit status, None until the process itself has ended
    kill_at: float | None = None  # when to kill the rest of the tree
    stopped_at: float | None = None  # when a signal (SIGSTOP) stopped the process, None if it is not stopped
    why: str = ""  # reason if the guard itself killed the process
    is_paused: bool = False  # the guard currently does not read its output
    is_read: bool = False  # it has closed its output
    is_users: bool = False  # a command of the user, which may leave stray processes; our own programs leave none

    @property
    def mark(self) -> str:
        return f"{os.getpid()}.{self.number:08d}."

    def spawn(self, argv: Sequence[str], more: Mapping[str, str], *, has_input: bool) -> None:
        """Start the process. Raise OSError or subprocess.SubprocessError if that fails.

        `more` contains additional environment variables. Standard input is /dev/null, or, if `has_input`, a pipe that
        stays open until the guard exits.
        """
        guard = os.getpid()
        ours, its = os.pipe()
        try:
            self.popen = subprocess.Popen(
                argv,
                env={**os.environ, **more, MARK_VARIABLE: self.mark, "TORCHELASTIC_ERROR_FILE": str(self.error_file)},
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=its,
                stderr=its,
                start_new_session=True,
                preexec_fn=lambda: _prepare(guard),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        os.set_blocking(ours, False)
        self.pid, self.output = self.popen.pid, ours

    def record_exit(self, status: int) -> None:
        self.status = status
        if self.popen is not None:
            self.popen.returncode = status

    def write_log(self, data: bytes) -> str:
        """Append `data` to the log. Return a message for the user, or an empty string.

        If writing fails, for example because the file system is full, drop the data, so the rank can continue. The
        message is a warning, at most once every LOG_WARNED_EVERY_S, or says that writing works again.
        """
        if self.log_path is None:
            return ""
        try:
            if self.log is None:
                self.log = open_log(self.log_path)
            while data:
                data = data[self.log.write(data) :]
        except OSError as e:
            self._close_log()  # a stale NFS descriptor does not recover, so reopen the file
            self.unlogged_bytes += len(data)
            if time.monotonic() < self.warned_at + LOG_WARNED_EVERY_S:
                return ""
            self.warned_at = time.monotonic()
            return f"cannot write {self.log_path}: {e.strerror}; the rank continues, and the log is retried later"
        missing, self.unlogged_bytes = self.unlogged_bytes, 0
        return f"{self.log_path} is writable again; {missing} bytes are missing before this line" if missing else ""

    def open_log(self) -> str:
        """Open the log before the process starts. Return a warning if its file system is full or unreachable.

        Raises:
            OSError: The path cannot be used as a log file.
        """
        if self.log_path is None:
            return ""
        try:
            self.log = open_log(self.log_path)
        except OSError as e:
            if e.errno not in PASSING_ERRORS:
                raise
        return self.write_log(b"")

    def _close_log(self) -> None:
        log, self.log = self.log, None
        if log is not None:
            with contextlib.suppress(OSError):  # NFS reports failed writes when the file is closed
                log.close()

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
        self._close_log()
        if self.popen is not None and self.popen.stdin is not None:
            self.popen.stdin.close()

    def error(self) -> str:
        """Return the contents of the error file that torch's @record wrote, or an empty string, and delete the file."""
        try:
            with self.error_file.open("rb") as file:
                text = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
            self.error_file.unlink()
        except OSError:
            return ""
        return text


def open_log(path: str) -> io.FileIO:
    """Open a log file for appending, readable by this user only.

    Raise OSError for a link, a pipe or another user's file, because another user may have created one under the
    predictable name.
    """
    make_private(Path(path).parent)
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    remedy = "remove it, or choose another --log-dir"
    not_plain = OSError(errno.EPERM, f"is not a regular file of this user only; {remedy}", path)
    try:
        descriptor = os.open(path, how, 0o600)
    except OSError as e:
        raise not_plain if e.errno in (errno.ENXIO, errno.ELOOP) else e from None  # a pipe, a link
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(descriptor)
        raise not_plain
    return io.FileIO(descriptor, "ab")


def _prepare(guard: int) -> None:
    die_with_parent(guard, signal.SIGKILL)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # In a background job of a shell, SIGINT is ignored, and child processes would inherit this.
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
