"""How a generation that is over is ended in this process: by an exception, and aborts; or the process.

The exception comes first. A kernel of NCCL that is aborted looks as if it had completed, with anything in its tensors:
no line of the function may run after that, least of all one that saves a checkpoint. Aborts may take long or hang, so
they run on a thread of their own. What they abort belongs to the generation that is over, so the next one begins after
them.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

from agent_client.step.stop_signals import is_uninterrupted

log = logging.getLogger(__name__)


# -- async exception ----------------------------------------------------------
#
# A function that another thread may end by an exception, whatever it does, as long as it comes back to Python.
#
# An asynchronous exception is delivered only inside a section: its end takes the lock that the delivery holds, and
# then lets one arrive that is already on its way. It is never taken back (PyThreadState_SetAsyncExc with None makes
# CPython 3.11 hang in the next traced function). A signal that does nothing ends what the main thread waits for: a
# sleep, a lock, a socket; its handler is where the exception arrives.

T = TypeVar("T")

WAKE_SIGNAL = signal.SIGRTMIN + 7
AGAIN_AFTER_S = 0.25
"""Deliveries are so far apart: the end of a section, microseconds, meets one at most."""
BRIEF_S = 5.0
"""What is brief is left alone for so long: the time that torch gives a DataLoader's workers to end."""
_BRIEF_MODULES = frozenset(
    {"multiprocessing.reduction", "multiprocessing.resource_sharer", "torch.multiprocessing.reductions"}
)
_BRIEF = frozenset(
    {
        ("multiprocessing.popen_fork", "_launch"),
        ("multiprocessing.popen_forkserver", "_launch"),
        ("multiprocessing.popen_spawn_posix", "_launch"),
        ("multiprocessing.util", "__call__"),
        ("torch.utils.data.dataloader", "__init__"),
        ("weakref", "__call__"),
    }
)
_IMPORTLIB = "<frozen importlib._bootstrap>"
_BYTECODES = 100  # more than enough for what was delivered to arrive


class Interruption(BaseException):
    """Raised inside a wrapped function whose generation is over. No `except Exception` holds it up."""


class InterruptibleSection:
    """One at a time, in the thread that runs it. `interrupt` is for any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._can_wake = False
        self._again_at = 0.0
        self._asked_at: float | None = None

    def run(self, function: Callable[[], T], is_over: Callable[[], bool]) -> T:
        """`function()`. Raises Interruption if it `is_over` before it begins, or is interrupted."""
        self._can_wake = _listen()
        try:
            with self._lock:
                if is_over():
                    raise Interruption
                self._thread, self._again_at, self._asked_at = threading.get_ident(), 0.0, None
            return function()
        finally:
            self.close()

    def interrupt(self) -> bool:
        """Raise Interruption in the function. False: none is running, it was interrupted just now, or it is in what has
        to be done whole: a module whose import was interrupted is of no use to the next run, and a descriptor or a
        process that is just handed over would be nobody's."""
        with self._lock:
            now = time.monotonic()
            self._asked_at = now if self._asked_at is None else self._asked_at
            if self._thread is None or now < self._again_at or self._is_uninterrupted(self._thread, now):
                return False
            self._again_at = now + AGAIN_AFTER_S
            thread = ctypes.c_ulong(self._thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Interruption))
            if self._can_wake:
                signal.pthread_kill(self._thread, WAKE_SIGNAL)
            return True

    def _is_uninterrupted(self, thread: int, now: float) -> bool:
        spares_brief = self._asked_at is not None and now < self._asked_at + BRIEF_S
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code is not InterruptibleSection.run.__code__:
            code = frame.f_code
            if code.co_filename == _IMPORTLIB or is_uninterrupted(code):
                return True
            if spares_brief and _is_brief(frame):
                return True
            frame = frame.f_back
        return False

    def close(self) -> None:
        """Nothing arrives any more. Also for the caller of `run`, when an Interruption has left it: one more may have
        come in its last instant."""
        while True:
            try:
                with self._lock:
                    self._thread = None
                for _ in range(_BYTECODES):  # a late one arrives here
                    pass
                return
            except Interruption:
                continue


def _is_brief(frame: FrameType) -> bool:
    """A finaliser, which would swallow what is raised in it, or code that hands over a descriptor or a process."""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    return name == "__del__" or module in _BRIEF_MODULES or (module, name) in _BRIEF


def _listen() -> bool:
    """Whether the wake signal reaches this thread and does no harm. Its handler stays: a late one must not kill."""
    if threading.current_thread() is not threading.main_thread():
        return False
    found = signal.getsignal(WAKE_SIGNAL)
    if found is signal.SIG_DFL:
        signal.signal(WAKE_SIGNAL, _woken)
        return True
    return found is _woken


def _woken(number: int, frame: FrameType | None) -> None:
    """What was delivered arrives when this begins."""


KILLED_STATUS = 137  # what a shell says of SIGKILL


class Interrupter:
    def __init__(self, section: InterruptibleSection, aborts: Sequence[Callable[[], object]]) -> None:
        self._section = section
        self._aborts = aborts
        self._lock = threading.Lock()
        self._runs = False
        self._aborting: threading.Thread | None = None

    def begin(self) -> None:
        """A generation runs from now on."""
        with self._lock:
            self._runs, self._aborting = True, None

    def end(self) -> None:
        """It does not, and nothing of it is aborted any more. Waits for the aborts that are under way; those that hang
        are ended by the hard timeout, with the process."""
        with self._lock:
            self._runs, aborting = False, self._aborting
        if aborting is not None:
            aborting.join()

    def interrupt(self, reason: str) -> None:
        with self._lock:
            if not self._runs:
                return
            self._section.interrupt()
            if self._aborting is not None:
                return
            log.warning("interrupted: %s", reason)
            self._aborting = threading.Thread(target=self._abort, name="lighthouse-abort", daemon=True)
            self._aborting.start()

    def kill(self, reason: str) -> None:
        log.critical("killing this process: %s", reason)
        sys.stderr.write(f"this process is ended: {reason}; where its threads are:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        os._exit(KILLED_STATUS)

    def _abort(self) -> None:
        for abort in self._aborts:
            try:
                abort()
            except Exception:
                log.exception("an abort failed")
        self._section.interrupt()  # once more: it may have been in what has to be done whole
