"""Interrupts a function whose generation has ended: first by an exception, then by aborts, and last by a kill.

The exception comes first. An aborted NCCL kernel looks as if it had completed, with arbitrary data in its tensors, so
no line of the function may run after an abort, least of all one that saves a checkpoint. Aborts may take a long time or
hang, so they run on a separate thread. They affect only the old generation, because the next generation starts only
after the aborts have finished.

`InterruptibleSection` raises the exception in the thread that runs the function. In the main thread, the handler of
WAKE_SIGNAL raises it, as Python raises KeyboardInterrupt. A signal also ends a sleep, a wait for a lock, and a socket
operation, and its handler knows exactly which line it interrupts. In another thread, or if the script handles the
signal itself, the exception is *delivered* with PyThreadState_SetAsyncExc, only while the function is inside the
section, and the interpreter raises it in that thread soon afterwards. Leaving the section takes the lock that a
delivery holds, and then waits until an exception that was already delivered is raised. A delivery is never revoked,
because PyThreadState_SetAsyncExc with None makes CPython 3.11 hang in the next traced function.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from agent_client.step.stop_signals import is_uninterrupted

if TYPE_CHECKING:
    from agent_client.collectives.group_spec import Abortable
    from agent_client.restart.torch_scope import TorchScope

log = logging.getLogger(__name__)


T = TypeVar("T")

WAKE_SIGNAL = signal.SIGRTMIN + 7
AGAIN_AFTER_S = 0.25
"""Minimum time in seconds between two deliveries. Leaving a section takes microseconds, so at most one delivery can
happen while the function leaves it."""
BRIEF_S = 5.0
"""Time in seconds for which code that should not be interrupted may continue. torch gives DataLoader workers as much
time to exit."""
SETTLE_TRIES, SETTLE_TRY_S = 10, 0.001
"""Before the aborts, check up to SETTLE_TRIES times, SETTLE_TRY_S seconds apart, whether the main thread has handled
the signal. The total is short, because a thread that is blocked in C code cannot handle a signal."""
_BRIEF_MODULES = frozenset(
    {"multiprocessing.reduction", "multiprocessing.resource_sharer", "torch.multiprocessing.reductions"}
)
_BRIEF = frozenset(
    {
        ("logging", "_acquireLock"),
        ("logging", "_releaseLock"),
        ("logging", "acquire"),
        ("logging", "release"),
        ("multiprocessing.popen_fork", "_launch"),
        ("multiprocessing.popen_forkserver", "_launch"),
        ("multiprocessing.popen_spawn_posix", "_launch"),
        ("multiprocessing.util", "__call__"),
        ("torch.utils.data.dataloader", "__init__"),
        ("weakref", "__call__"),
    }
)
_WITH_METHODS = frozenset({"__enter__", "__exit__"})
_IMPORTLIB = "<frozen importlib._bootstrap>"
_BYTECODES = 100  # more than enough bytecodes for a delivered exception to be raised


class Interruption(BaseException):
    """Raised inside a wrapped function whose generation has ended. `except Exception` does not catch it."""


class InterruptibleSection:
    """Runs one function at a time in the calling thread. Other threads can `interrupt` the function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._has_handler = False
        self._is_signalled = False
        self._signal_again_at = 0.0
        self._was_refused = False
        self._again_at = 0.0
        self._asked_at: float | None = None

    def run(self, function: Callable[[], T], is_over: Callable[[], bool]) -> T:
        """Call `function` so that it can be interrupted, and return its result.

        Args:
            function: The generation's function. It runs in the calling thread.
            is_over: Returns whether the generation has already ended.

        Raises:
            Interruption: The generation had already ended, or the function was interrupted.
        """
        self._has_handler, self._is_signalled, self._was_refused = _install_handler(), False, False
        try:
            with self._lock:
                if is_over():
                    raise Interruption
                if self._has_handler:
                    _in_main_thread.append(self)
                self._thread, self._again_at, self._asked_at = threading.get_ident(), 0.0, None
            return function()
        finally:
            try:
                self.stop_delivery()
            finally:  # the handler may have raised the exception before stop_delivery caught it
                if self in _in_main_thread:
                    _in_main_thread.remove(self)

    @property
    def is_settled(self) -> bool:
        """False if the last signal to the main thread has not taken effect.

        The main thread may not have handled the signal yet. Or it was running code that must complete, so its handler
        did not raise Interruption.
        """
        return not (self._is_signalled or self._was_refused)

    def interrupt(self) -> bool:
        """Raise Interruption in the function, unless the function is running code that must complete.

        An interrupted import would leave the module unusable in the next attempt. Code that passes on a file descriptor
        or a process would leak it. Code that takes or frees a lock would leave it locked.

        Returns:
            False if nothing was done: no function is running, the last exception was raised within AGAIN_AFTER_S, or
            (outside the main thread) the function is running code that must complete. In the main thread, True means
            only that the signal was sent. Its handler then decides whether to raise the exception.
        """
        with self._lock:
            now = time.monotonic()
            self._asked_at = now if self._asked_at is None else self._asked_at
            if self._thread is None or now < self._again_at:
                return False
            if self._has_handler:
                if not self._is_signalled or now >= self._signal_again_at:  # a wait may have begun just after it
                    self._is_signalled, self._signal_again_at = True, now + AGAIN_AFTER_S
                    signal.pthread_kill(self._thread, WAKE_SIGNAL)
                return True
            if self._must_complete(sys._current_frames().get(self._thread), now):  # pyright: ignore[reportPrivateUsage]
                return False
            self._again_at = now + AGAIN_AFTER_S
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Interruption))
            return True

    def raise_at(self, frame: FrameType | None) -> None:
        """Raise Interruption in the main thread if a signal was sent, unless `frame` is in code that must complete.

        The signal's handler calls this with the frame that it has interrupted. This method must not take the lock,
        because the interrupted code may hold it.
        """
        if not self._is_signalled:
            return
        self._is_signalled, now = False, time.monotonic()
        self._was_refused = self._thread is not None and self._must_complete(frame, now)
        if self._thread is None or now < self._again_at or self._was_refused:
            return
        self._again_at = now + AGAIN_AFTER_S
        raise Interruption

    def _must_complete(self, frame: FrameType | None, now: float) -> bool:
        spares_brief = self._asked_at is not None and now < self._asked_at + BRIEF_S
        if spares_brief and frame is not None and frame.f_code.co_name in _WITH_METHODS:
            return True  # it may have taken a lock whose `with` block has not begun, or not have freed it yet
        while frame is not None and frame.f_code is not InterruptibleSection.run.__code__:
            code = frame.f_code
            if code.co_filename == _IMPORTLIB or is_uninterrupted(code):
                return True
            # A finalizer would swallow the exception. Other brief code passes on a descriptor, or locks the log.
            module, name = frame.f_globals.get("__name__"), code.co_name
            is_brief = name == "__del__" or module in _BRIEF_MODULES or (module, name) in _BRIEF
            if spares_brief and is_brief:
                return True
            frame = frame.f_back
        return False

    def stop_delivery(self) -> None:
        """Stop delivering exceptions, and discard one that was already delivered but not raised yet.

        After an Interruption, the caller of `run` must also call this method, because another exception may have been
        delivered while the first one propagated.
        """
        while True:
            try:
                with self._lock:
                    self._thread = None
                for _ in range(_BYTECODES):  # a late exception is raised here
                    pass
                return
            except Interruption:
                continue


_in_main_thread: list[InterruptibleSection] = []
"""Sections that run in the main thread, the outermost first."""


def _install_handler() -> bool:
    """Install the handler of WAKE_SIGNAL. Return False outside the main thread, or if the script uses the signal.

    The handler stays installed, because without a handler a late signal would kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    found = signal.getsignal(WAKE_SIGNAL)
    if found is signal.SIG_DFL:
        signal.signal(WAKE_SIGNAL, _on_wake_signal)
        return True
    return found is _on_wake_signal


def _on_wake_signal(number: int, frame: FrameType | None) -> None:
    for section in _in_main_thread:
        section.raise_at(frame)


KILLED_STATUS = 137  # the exit status that a shell reports after SIGKILL


class ProcessGroups:
    """Process groups of a wrapped function: those of agent_client, and those that it creates with torch.distributed.

    A function that is waiting for a dead peer is often blocked in C code, in which no exception can be raised. Aborting
    the function's process groups from another thread ends the wait. This class never imports torch itself.
    """

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self._torch: TorchScope | None = None
        self._aborted: list[Abortable] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def patched(self, generation: int) -> Generator[None]:
        if self._torch is None and "torch" in sys.modules and sys.modules["torch"].distributed.is_available():
            from agent_client.restart.torch_scope import TorchScope

            self._torch = TorchScope(self._lighthouse)
        if self._torch is None:
            yield
            return
        self._torch.patch(generation)
        try:
            yield
        finally:
            self._torch.restore()

    def close(self) -> None:
        if self._torch is not None:
            self._torch.unfreeze()

    def abort(self) -> None:
        with self._lock:
            open_groups = sys.modules.get("agent_client.collectives.group_spec")
            if open_groups is not None:
                self._aborted += open_groups.registered()
            try:
                if self._torch is not None:
                    self._torch.abort()  # first, because NCCL groups that are not aborted together may block each other
            finally:
                if open_groups is not None:
                    open_groups.abort_all()

    def has_lost_peer(self) -> bool:
        """Return whether a process group has lost a peer, which may have caused the function's exception."""
        open_groups = sys.modules.get("agent_client.collectives.group_spec")
        return open_groups is not None and open_groups.has_lost_peer()

    def recover(self) -> None:
        if self._torch is not None:
            self._torch.recover()
        self._aborted.clear()


class Interrupter:
    """Interrupts the function that is running in the current generation. `interrupt` and `kill` are thread-safe."""

    def __init__(self, section: InterruptibleSection, aborts: Sequence[Callable[[], object]]) -> None:
        self._section = section
        self._aborts = aborts
        self._lock = threading.Lock()
        self._runs = False
        self._aborting: threading.Thread | None = None

    def arm(self) -> None:
        with self._lock:
            self._runs, self._aborting = True, None

    def disarm(self) -> None:
        """Start no more aborts, because the generation has ended, and wait until the running aborts have finished.

        If an abort hangs, this call does too, until the process is killed after the option `hard_timeout`.
        """
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
        for _ in range(SETTLE_TRIES):  # no line of the function should run after an abort
            if self._section.is_settled:
                break
            time.sleep(SETTLE_TRY_S)
            self._section.interrupt()
        for abort in self._aborts:
            try:
                abort()
            except Exception:
                log.exception("an abort failed")
        self._section.interrupt()  # again, because the function may have been in code that must complete
