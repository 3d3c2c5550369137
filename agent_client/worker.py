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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        self._tasks.put((task, done))
        return done

    def close(self, timeout_s: float) -> None:
        """End after what was submitted, at most `timeout_s` from now."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, done = entry
            try:
                done.set_result(task())
            except BaseException as e:  # noqa: BLE001  it belongs to whoever waits for the result
                done.set_exception(e)
            del entry, task, done
