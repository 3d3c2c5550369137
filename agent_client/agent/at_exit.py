"""Closes what is still open before the interpreter ends, or before a wrapped function runs again.

The interpreter ends a daemon thread where it next asks for the interpreter's lock. One that comes out of torch's C++
code is unwound there, through frames that may not be unwound, and the process dies by SIGABRT, whatever status it was
to end with. A forked child has nothing to close for its parent.
"""

import atexit
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_end(closable: Closable) -> None:
    _open.add(closable)


def was_closed(closed: Closable) -> None:
    """Forget it."""
    _open.discard(closed)


def opened() -> list[Closable]:
    """What is open now."""
    return list(_open)


def close_all(but: Sequence[Closable] = ()) -> None:
    """Raises what the last one of them raises; all are closed."""
    with ExitStack() as closing:
        for each in opened():
            if not any(each is other for other in but):
                closing.callback(each.close)


atexit.register(close_all)
os.register_at_fork(after_in_child=_open.clear)
