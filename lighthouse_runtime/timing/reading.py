"""A blocking read with a deadline: on a thread of its own, which the end of the program does not wait for."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lighthouse_protocol.refusals import DeadlinePassed

T = TypeVar("T")


class Reading(Generic[T]):
    """`read` begins at once; it may fail, and may never return."""

    def __init__(self, name: str, read: Callable[[], T], limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._outcomes = queue.SimpleQueue[tuple[T | None, Exception | None]]()
        threading.Thread(target=self._run, args=(read,), name=f"read {name}", daemon=True).start()

    def result(self) -> T:
        """What was read. Waits until `limit_s` after the beginning at most; to be called once.

        Raises what `read` raised, and DeadlinePassed.
        """
        try:
            value, error = self._outcomes.get(timeout=max(0.0, self._ends_at - time.monotonic()))
        except queue.Empty:
            raise DeadlinePassed(f"no answer within {self._limit_s:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # of T, which None may be

    def _run(self, read: Callable[[], T]) -> None:
        try:
            self._outcomes.put((read(), None))
        except Exception as e:  # noqa: BLE001  it is raised by result()
            self._outcomes.put((None, e))
