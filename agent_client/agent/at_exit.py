"""Closes what is still open before the interpreter ends, or before a wrapped function runs again.

The interpreter ends a daemon thread where it next asks for the interpreter's lock. One that comes out of torch's C++
code is unwound there, through frames that may not be unwound, and the process dies by SIGABRT, whatever status it was
to end with. A forked child has nothing to close for its parent.
"""

import atexit
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_of_process: "weakref.WeakSet[Closable]" = weakref.WeakSet()


_attached: "weakref.WeakKeyDictionary[object, weakref.WeakSet[Closable]]" = weakref.WeakKeyDictionary()


def close_at_end(closable: Closable, *, is_of_process: bool = False) -> None:
    """`is_of_process`: it goes on when a wrapped function that has opened it runs again."""
    (_of_process if is_of_process else _open).add(closable)


def was_closed(closed: Closable) -> None:
    """Forget it."""
    _open.discard(closed)
    _of_process.discard(closed)


def close_with(owner: object, closable: Closable) -> None:
    """Have `close_attached(owner)` close `closable`, too."""
    _attached.setdefault(owner, weakref.WeakSet()).add(closable)


def close_attached(owner: object) -> None:
    close_each(_attached.pop(owner, ()))


def opened() -> list[Closable]:
    """What is open now, but for what is of the process."""
    return list(_open)


def close_each(opened: Iterable[Closable]) -> None:
    """All of them. Raises what the last one that fails raises."""
    with ExitStack() as closing:
        for each in opened:
            closing.callback(each.close)


def _forget_all() -> None:
    _open.clear()
    _of_process.clear()


atexit.register(lambda: close_each([*_open, *_of_process]))
os.register_at_fork(after_in_child=_forget_all)
