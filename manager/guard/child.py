"""One process below the guard: how it is started, and what is kept of it until its whole tree is gone."""

import errno
import os
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lighthouse_runtime.process.state_folder import make_private
from manager.guard.preload import MARK_VARIABLE, die_with
from manager.guard.rules.output import Lines

_MAX_ERROR_BYTES = 1 << 16


@dataclass(slots=True)
class Child:
    """`status`: of the process itself, once it has ended. `kill_at`: when what is left of its tree is killed.
    `stopped_at`: by a signal, and not continued since. `why`: it was killed by the guard itself. `is_users`: it runs
    what the user has given, and may start anything; a program of ours starts nothing that stays."""

    number: int
    label: str
    is_shown: bool
    log: IO[bytes] | None
    error_file: Path
    pid: int = 0
    output: int = -1
    popen: "subprocess.Popen[bytes] | None" = None  # None: it was forked from the preloaded interpreter
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
        """Of one length for all of them: a forked process writes its own over that of the other one."""
        return f"{os.getpid()}.{self.number:08d}."

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, **more, MARK_VARIABLE: self.mark, "TORCHELASTIC_ERROR_FILE": str(self.error_file)}

    def spawn(
        self, argv: Sequence[str], more: Mapping[str, str], *, has_input: bool, keeps: Sequence[int] = ()
    ) -> None:
        """Start `argv`, with the descriptors `keeps`. Raises OSError or subprocess.SubprocessError."""
        guard = os.getpid()
        ours, its = os.pipe()
        try:
            self.popen = subprocess.Popen(
                argv,
                env=self.environment(more),
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=its,
                stderr=its,
                start_new_session=True,
                preexec_fn=lambda: _prepare(guard),
                pass_fds=keeps,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self.born(self.popen.pid, ours)

    def born(self, pid: int, output: int) -> None:
        os.set_blocking(output, False)
        self.pid, self.output = pid, output

    def ended(self, status: int) -> None:
        self.status = status
        if self.popen is not None:
            self.popen.returncode = status

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
        for pipe in (self.log, None if self.popen is None else self.popen.stdin):
            if pipe is not None:
                pipe.close()

    def error(self) -> str:
        """What it has left in its error file, which goes."""
        try:
            with self.error_file.open("rb") as file:
                text = file.read(_MAX_ERROR_BYTES).decode(errors="replace")
            self.error_file.unlink()
        except OSError:
            return ""
        return text


def open_log(path: str | None) -> IO[bytes] | None:
    """To append to; for this user alone. Its name can be guessed: a link, a pipe, or a file of another user that waits
    there is refused. Raises OSError."""
    if path is None:
        return None
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
    return open(descriptor, "ab", buffering=0)


def _prepare(guard: int) -> None:
    die_with(guard)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # A job in the background ignores SIGINT, and would hand that on.
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
