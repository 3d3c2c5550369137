"""Closes what is still open before the interpreter ends.

The interpreter ends a daemon thread where it next asks for the interpreter's lock. One that comes out of torch's C++
code is unwound there, through frames that may not be unwound, and the process dies by SIGABRT, whatever status it was
to end with. A forked child has nothing to close for its parent.
"""

import atexit
import os
import weakref
from contextlib import ExitStack
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_end(opened: Closable) -> None:
    _open.add(opened)


def was_closed(closed: Closable) -> None:
    """Forget it."""
    _open.discard(closed)


def _close_all() -> None:
    with ExitStack() as closing:
        for opened in list(_open):
            closing.callback(opened.close)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)
