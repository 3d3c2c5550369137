"""A rank's own lines on a wait for a quorum that lasts: what for. On a thread of its own, since the request blocks."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator

from lighthouse_protocol.rules.quorum_wait import QuorumWait

log = logging.getLogger(__name__)

CLOSED_WITHIN_S = 1.0


class WaitLog:
    """`waiting_for` says it, in words; it is asked on that thread."""

    def __init__(self, group_rank: int, waiting_for: Callable[[], str]) -> None:
        self._group_rank = group_rank
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_idle = self._is_closed = False
        self._step = 0

    @contextlib.contextmanager
    def waiting(self, step: int) -> Generator[None]:
        """A request for the quorum of that step is under way. An exception that leaves the block is no answer."""
        self._begin(step)
        try:
            yield
        except BaseException:
            with self._changed:
                self._wait.leave(time.monotonic())
                self._changed.notify()
            raise
        with self._changed:
            line = self._wait.answered(time.monotonic())
            if line:
                self._changed.notify()  # it looks again late in a wait that it has spoken of
        if line:
            log.info("rank %d, step %d: %s", self._group_rank, step, line)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSED_WITHIN_S)

    def _begin(self, step: int) -> None:
        with self._changed:
            self._step = step
            self._wait.begin(time.monotonic())
            if self._is_idle:
                self._changed.notify()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="lighthouse waits", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                line, step = self._wait.news(self._waiting_for(), time.monotonic()), self._step
                if not line:
                    next_at = self._wait.next_at(time.monotonic())
                    self._is_idle = next_at is None
                    self._changed.wait(None if next_at is None else max(0.0, next_at - time.monotonic()))
            if line:
                log.warning("rank %d, step %d: %s", self._group_rank, step, line)
