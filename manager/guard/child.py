"""One process below the guard: how it is started, and what is kept of it until its whole tree is gone."""

import contextlib
import errno
import io
import os
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse_runtime.process.state_folder import make_private
from manager.guard.process_tree import MARK_VARIABLE, die_with
from manager.guard.rules import Lines

_MAX_ERROR_BYTES = 1 << 16
LOG_WARNED_EVERY_S = 60.0
PASSING_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EFBIG))
"""What a file system says that is full or away: it may work again."""


@dataclass(slots=True)
class Child:
    """`status`: of the process itself, once it has ended. `kill_at`: when what is left of its tree is killed.
    `stopped_at`: by a signal, and not continued since. `why`: it was killed by the guard itself. `is_users`: it runs
    what the user has given, and may start anything; a program of ours starts nothing that stays."""

    number: int
    label: str
    is_shown: bool
    log_path: str | None
    error_file: Path
    pid: int = 0
    output: int = -1
    log: io.FileIO | None = None
    unlogged_bytes: int = 0  # since the log could be written last
    warned_at: float = -LOG_WARNED_EVERY_S
    popen: "subprocess.Popen[bytes] | None" = None  # None until it is started
    lines: Lines = field(default_factory=Lines)
    status: int | None = None
    kill_at: float | None = None
    stopped_at: float | None = None
    why: str = ""
    is_paused: bool = False
    is_read: bool = False  # it has closed its output
    is_users: bool = False

    @property
    def mark(self) -> str:
        return f"{os.getpid()}.{self.number:08d}."

    def spawn(self, argv: Sequence[str], more: Mapping[str, str], *, has_input: bool) -> None:
        """Start `argv`. Raises OSError or subprocess.SubprocessError."""
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

    def ended(self, status: int) -> None:
        self.status = status
        if self.popen is not None:
            self.popen.returncode = status

    def write_log(self, data: bytes) -> str:
        """Append `data` to the log.

        A file system that is full or away never ends a rank: its output is read on, and logged again when there is
        room.

        Returns:
            A line for people when the log begins to fail, and when it works again; else an empty one.
        """
        if self.log_path is None:
            return ""
        try:
            if self.log is None:
                self.log = open_log(self.log_path)
            while data:
                data = data[self.log.write(data) :]
        except OSError as e:
            self._close_log()  # a stale descriptor stays stale
            self.unlogged_bytes += len(data)
            if time.monotonic() < self.warned_at + LOG_WARNED_EVERY_S:
                return ""
            self.warned_at = time.monotonic()
            return f"cannot write {self.log_path}: {e.strerror}; the rank continues, and is logged again later"
        missing, self.unlogged_bytes = self.unlogged_bytes, 0
        return f"{self.log_path} is written again; {missing} bytes are missing before this" if missing else ""

    def open_log(self) -> str:
        """Open the log before the start, and return a line for people if its file system is full or away.

        Raises:
            OSError: The path can never be a log.
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
            with contextlib.suppress(OSError):  # NFS reports there what it could not write
                log.close()

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
        self._close_log()
        if self.popen is not None and self.popen.stdin is not None:
            self.popen.stdin.close()

    def error(self) -> str:
        """What it has left in its error file, which goes."""
        try:
            with self.error_file.open("rb") as file:
                text = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
            self.error_file.unlink()
        except OSError:
            return ""
        return text


def open_log(path: str) -> io.FileIO:
    """To append to; for this user alone. Its name can be guessed: a link, a pipe, or a file of another user that waits
    there is refused. Raises OSError."""
    make_private(Path(path).parent)
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    not_plain = OSError(errno.EPERM, "is no plain file of this user alone; remove it, or name another --log-dir", path)
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
    die_with(guard)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # A job in the background ignores SIGINT, and would hand that on.
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
