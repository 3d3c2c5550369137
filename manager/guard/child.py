"""One process below the guard: how it is started, and what is kept of it until its whole tree is gone."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from manager.guard.preload import MARK_VARIABLE, die_with
from manager.guard.rules.output import Lines

_MAX_ERROR_BYTES = 1 << 16


@dataclass(slots=True)
class Child:
    """`status`: of the process itself, once it has ended. `kill_at`: when what is left of its tree is killed."""

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
    is_paused: bool = False
    is_read: bool = False  # it has closed its output

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
    if path is None:
        return None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", buffering=0)


def _prepare(guard: int) -> None:
    die_with(guard)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # A job in the background ignores SIGINT, and would hand that on.
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
