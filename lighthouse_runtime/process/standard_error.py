"""Standard error of a daemon, which the daemon never waits for.

A write to standard error blocks while its reader is paused, for example a terminal after Ctrl-S, or a container runtime
whose disk is full. A daemon that waits for the reader would stop the training. Its log lines therefore wait in memory,
and are written before the next line or at the exit.
"""

import logging
import os
import select
import sys
import time

MAX_UNWRITTEN_BYTES = 1 << 20  # further lines are dropped; the lighthouse's GET /log still shows them
EXIT_WAIT_S = 1.0  # how long an exit waits for the reader
_PIECE_BYTES = select.PIPE_BUF  # a writable pipe accepts this many bytes without blocking


class StandardError(logging.Handler):
    """Writes log lines to standard error as far as this is possible without blocking, and the rest later."""

    def __init__(self) -> None:
        super().__init__()
        self._unwritten = b""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if len(self._unwritten) < MAX_UNWRITTEN_BYTES:
                self._unwritten += f"{self.format(record)}\n".encode(sys.stderr.encoding, "backslashreplace")
        except Exception:  # noqa: BLE001 - a wrong format string, whose caller must not fail
            self.handleError(record)
        self._write(0.0)

    def flush(self) -> None:  # logging calls it at the exit
        self._write(EXIT_WAIT_S)

    def _write(self, wait_s: float) -> None:
        try:
            descriptor = sys.stderr.fileno()
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            ends_at = time.monotonic() + wait_s
            while self._unwritten and poll.poll(1000 * max(0.0, ends_at - time.monotonic())):
                self._unwritten = self._unwritten[os.write(descriptor, self._unwritten[:_PIECE_BYTES]) :]
        except BlockingIOError:  # the descriptor does not block, and its reader is paused
            pass
        except (OSError, ValueError):  # it is closed, or its file system is full
            self._unwritten = b""
