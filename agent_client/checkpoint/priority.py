"""Threads that nobody waits for leave the processor to those that train."""

import contextlib
import os
import threading

NICENESS = 10


def give_way() -> None:
    """The calling thread, for good. Linux has a priority for each thread; elsewhere nothing changes."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
