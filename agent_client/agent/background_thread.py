"""One background thread that does one thing after the other: a step's quorum first, then its collectives in order."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """A daemon thread: it never keeps the interpreter from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
        self._tasks.put((task, done))
        return done

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done. A task is, before its future is."""
        return self._unfinished == 0

    def close(self, timeout_s: float) -> None:
        """End after what was submitted, at most `timeout_s` from now."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, done = entry
            settle: Callable[[Any], None]
            try:
                settle, outcome = done.set_result, task()
            except BaseException as e:  # noqa: BLE001  it belongs to whoever waits for the result
                settle, outcome = done.set_exception, e
            with self._lock:
                self._unfinished -= 1
            settle(outcome)
            del entry, task, done, settle, outcome
