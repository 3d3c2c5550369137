"""A thread that nobody waits for leaves the processor, and the memory's bandwidth, to those that train."""

import contextlib
import os
import threading
import time

NICENESS = 10
WORKS_S = 0.002
"""At least, between two rests."""


class Pace:
    """Made by such a thread: from then on it has a lower priority, where the system has one for each thread (Linux),
    and with `rest` it works for half of its time at most. A priority alone would leave it all that is idle; and what
    one thread does to the memory, the others feel whatever its priority."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """For as long as the thread has had a processor since it rested last."""
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= WORKS_S:
            time.sleep(worked_s)
            self._rested_at = time.thread_time()
