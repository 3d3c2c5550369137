"""A child that ends with its parent, even with one that is killed."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: int = signal.SIGTERM) -> None:
    """Get signal `number` when the thread that started this process ends. Exits if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
