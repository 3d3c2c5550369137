"""Handles the exit of a rank: stop signals, cleanup at exit, and code that must not be interrupted.

A stop signal (SIGTERM from torchrun or Slurm) makes the manager drain the group, unless `lighthouse-manager run`
does that itself. The rank completes the steps that have already been granted, and then raises GroupDrained. torchrun
and its agent, or a scheduler and torchrun, may each send the same signal, so a second signal within SAME_WITHIN_S is
ignored. A later signal terminates the process as usual. So does any signal before the rank is connected to a
manager, because no peer depends on the rank then.

`close_at_end` closes objects before the interpreter exits, or before a wrapped function runs again. This is necessary
because the exiting interpreter terminates a daemon thread when the thread next acquires the GIL. If the thread is
returning from torch's C++ code at that moment, its stack is unwound through frames that do not allow this, and the
process dies by SIGABRT instead of exiting with its status. A forked child closes nothing.
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

from agent_client.manager_client.client import ManagerConnection
from lighthouse_protocol.refusals import LighthouseError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SAME_WITHIN_S = 5.0

_installed: "weakref.WeakSet[StopSignals]" = weakref.WeakSet()


class StopSignals:
    def __init__(self, manager: ManagerConnection, rank: int) -> None:
        self._manager = manager
        self._rank = rank
        self._taken: list[signal.Signals] = []
        self._handler = self._on_signal  # a single object, which can be compared with signal.getsignal by identity
        self._asked_at: float | None = None
        self._has_failed = False

    def install(self) -> None:
        """Handle SIGTERM, SIGHUP and SIGQUIT unless the script handles or ignores them. Call in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:  # neither handled by the script nor ignored by nohup
                signal.signal(number, self._handler)
                self._taken.append(number)
        _installed.add(self)

    def uninstall(self) -> None:
        """Restore the default handlers, unless the script has replaced ours. Call this in the main thread."""
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
        if not self._taken or self._has_failed or is_again or not self._manager.watch.is_open:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif asked_at is None:
            self._asked_at = now
            # The handler may have interrupted the script in a call over the same connection, so use another thread.
            threading.Thread(target=self._request_drain, args=(number,), name="drain", daemon=True).start()

    def _request_drain(self, number: int) -> None:
        name = signal.Signals(number).name
        try:
            log.warning("%s: the group finishes its step and leaves; a second signal ends this rank at once", name)
            self._manager.drain(f"{name} to rank {self._rank}")
        except LighthouseError as e:
            log.warning("cannot ask the manager to drain the group: %s; this rank ends", e)
            self._has_failed = True
            os.kill(os.getpid(), number)  # only the main thread may restore the default


class Closable(Protocol):
    def close(self) -> None: ...


_open: "weakref.WeakKeyDictionary[Closable, bool]" = weakref.WeakKeyDictionary()
"""Open objects, and whether each of them is closed only when the process exits."""


def close_at_end(closable: Closable, *, is_of_process: bool = False) -> None:
    """Register an object to be closed when the process exits, or before the wrapped function that opened it runs again.

    With `is_of_process`, it is closed only when the process exits.
    """
    _open[closable] = is_of_process


def forget_closed(closed: Closable) -> None:
    _open.pop(closed, None)


def opened() -> list[Closable]:
    """Return the registered objects that must be closed before a wrapped function runs again."""
    return [each for each, is_of_process in _open.items() if not is_of_process]


def close_each(opened: Iterable[Closable]) -> None:
    """Close all objects. If some of them raise, raise the last error."""
    with ExitStack() as closing:
        for each in opened:
            closing.callback(each.close)


def _after_fork() -> None:
    """Restore the default signal handlers in a forked child, such as a DataLoader worker, so that SIGTERM ends it."""
    for each in list(_installed):
        each.uninstall()
    _open.clear()


atexit.register(lambda: close_each(list(_open)))
os.register_at_fork(after_in_child=_after_fork)


P = ParamSpec("P")
T = TypeVar("T")

_codes: set[CodeType] = set()


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that must not be interrupted when its generation ends (restart/interrupter.py).

    The interruption is raised before or after the call. `function` must not block without a time limit.
    """
    _codes.add(function.__code__)
    return function


def is_uninterrupted(code: CodeType) -> bool:
    return code in _codes
