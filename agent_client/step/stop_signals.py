"""Signals that ask a rank to end, where no supervisor of ours drains its group before: torchrun's SIGTERM, Slurm's.

The first one has the group's manager drain: the rank does the steps that the peers count on, and then GroupDrained
ends it. torchrun and its agent, or a scheduler and torchrun, may each send the same signal: a second one within a
moment is the first. A later one ends the process as if this file did not exist, and so does any signal while no manager
knows the rank: no peer counts on it then.
"""

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import ParamSpec, Protocol, TypeVar

from lighthouse_protocol.refusals import LighthouseError

log = logging.getLogger(__name__)


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SAME_WITHIN_S = 5.0

_installed: "weakref.WeakSet[StopSignals]" = weakref.WeakSet()


class StopSignals:
    """`drain` asks the manager, given the reason, and raises LighthouseError. `is_known`: it watches the rank."""

    def __init__(self, drain: Callable[[str], None], is_known: Callable[[], bool], rank: int) -> None:
        self._drain = drain
        self._is_known = is_known
        self._rank = rank
        self._taken: list[signal.Signals] = []
        self._handler = self._on_signal  # signal.getsignal compares by identity
        self._asked_at: float | None = None
        self._has_failed = False

    def install(self) -> None:
        """Take the signals that the script has left to their default; outside of the main thread, none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:  # else the script's, or nohup's
                signal.signal(number, self._handler)
                self._taken.append(number)
        _installed.add(self)

    def uninstall(self) -> None:
        """Restore the default of those that still are this object's. An Agent that other threads close leaves them."""
        _installed.discard(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._taken:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)
        self._taken = []

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now, asked_at = time.monotonic(), self._asked_at
        is_again = asked_at is not None and now >= asked_at + SAME_WITHIN_S
        if not self._taken or self._has_failed or is_again or not self._is_known():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif asked_at is None:
            self._asked_at = now
            # Not here: a handler interrupts the script anywhere, in a call of the same connection, too.
            threading.Thread(target=self._ask, args=(number,), name="drain", daemon=True).start()

    def _ask(self, number: int) -> None:
        name = signal.Signals(number).name
        try:
            log.warning("%s: the group finishes its step and leaves; a second signal ends this rank at once", name)
            self._drain(f"{name} to rank {self._rank}")
        except LighthouseError as e:
            log.warning("cannot ask the manager to drain the group: %s; this rank ends", e)
            self._has_failed = True
            os.kill(os.getpid(), number)  # only the main thread may restore the default


def _restore_all() -> None:
    """A forked child, such as a loader's worker, ends by its parent's SIGTERM at once."""
    for each in list(_installed):
        each.uninstall()


os.register_at_fork(after_in_child=_restore_all)


# -- at exit ------------------------------------------------------------------
#
# Closes what is still open before the interpreter ends, or before a wrapped function runs again.
#
# The interpreter ends a daemon thread where it next asks for the interpreter's lock. One that comes out of torch's
# C++ code is unwound there, through frames that may not be unwound, and the process dies by SIGABRT, whatever status
# it was to end with. A forked child has nothing to close for its parent.


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


# -- uninterrupted ------------------------------------------------------------
#
# What is done whole: an interruption of a wrapped function comes before it, or after it.

P = ParamSpec("P")
T = TypeVar("T")

_codes: set[CodeType] = set()


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as it is. It must not wait for anything without a limit."""
    _codes.add(function.__code__)
    return function


def is_uninterrupted(code: CodeType) -> bool:
    return code in _codes
