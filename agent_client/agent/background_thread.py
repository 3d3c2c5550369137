"""One background thread that runs tasks in order: the quorum of a step first, then its collectives."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """A daemon thread: it does not keep the interpreter from ending."""

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
        """Whether all tasks are done. A task is done before its future is."""
        return self._unfinished == 0

    def close(self, timeout_s: float) -> None:
        """End after the submitted tasks; wait at most `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, done = entry
            settle: Callable[[Any], None]
            try:
                settle, outcome = done.set_result, task()
            except BaseException as e:  # noqa: BLE001  the caller that waits for the result gets it
                settle, outcome = done.set_exception, e
            with self._lock:
                self._unfinished -= 1
            settle(outcome)
            del entry, task, done, settle, outcome
