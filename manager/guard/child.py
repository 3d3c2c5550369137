"""A process that the guard has started.

`Child` exists until the last descendant of the process has ended. It starts the process, writes its log file, and holds
its output and exit status.
"""

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
"""Errors of a file system that is full or unreachable, and may recover."""


@dataclass(slots=True)
class Child:
    """A process and its descendants."""

    number: int
    label: str
    is_shown: bool
    log_path: str | None
    error_file: Path
    pid: int = 0
    output: int = -1
    log: io.FileIO | None = None
    unlogged_bytes: int = 0  # lost since the last successful write to the log
    warned_at: float = -LOG_WARNED_EVERY_S
    popen: "subprocess.Popen[bytes] | None" = None  # None until the start
    lines: Lines = field(default_factory=Lines)
    status: int | None = None  # exit status, None until the process itself has ended
    kill_at: float | None = None  # when the rest of the tree is killed
    stopped_at: float | None = None  # when a signal stopped the process, None if it runs
    why: str = ""  # reason if the guard itself has killed the process
    is_paused: bool = False  # its output is not read at present
    is_read: bool = False  # it has closed its output
    is_users: bool = False  # a command of the user, which may leave strays; our own programs leave none

    @property
    def mark(self) -> str:
        return f"{os.getpid()}.{self.number:08d}."

    def spawn(self, argv: Sequence[str], more: Mapping[str, str], *, has_input: bool) -> None:
        """Start `argv` with `more` environment variables, and with an open pipe as standard input if `has_input`.

        Raises:
            OSError: The command cannot be run.
            subprocess.SubprocessError: The new process cannot be prepared.
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

    def ended(self, status: int) -> None:
        self.status = status
        if self.popen is not None:
            self.popen.returncode = status

    def write_log(self, data: bytes) -> str:
        """Append `data` to the log.

        A full or unreachable file system never ends a rank. Its output is still read, and logged again later.

        Returns:
            A line for people when the log begins to fail, repeated at most every LOG_WARNED_EVERY_S, and when it works
            again. Otherwise an empty string.
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
        """Open the log before the start. Return a line for people if its file system is full or unreachable.

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
            with contextlib.suppress(OSError):  # NFS reports failed writes here
                log.close()

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
        self._close_log()
        if self.popen is not None and self.popen.stdin is not None:
            self.popen.stdin.close()

    def error(self) -> str:
        """Return the contents of the process's error file, and delete the file."""
        try:
            with self.error_file.open("rb") as file:
                text = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
            self.error_file.unlink()
        except OSError:
            return ""
        return text


def open_log(path: str) -> io.FileIO:
    """Open a log file for appending, readable by this user only.

    Raises:
        OSError: The file cannot be opened, or is a link, a pipe or another user's file. Others can guess its name, and
            may have created it.
    """
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
        # A background job of a shell ignores SIGINT, and its children would inherit that.
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
