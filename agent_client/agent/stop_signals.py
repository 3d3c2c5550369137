"""Signals that ask a rank to end, where no supervisor of ours drains its group before: torchrun's SIGTERM, Slurm's.

The first one has the group's manager drain: the rank does the steps that the peers count on, and then GroupDrained
ends it. torchrun and its agent, or a scheduler and torchrun, may each send the same signal: a second one within a
moment is the first. A later one ends the process as if this file did not exist, and so does any signal while no manager
knows the rank: no peer counts on it then.
"""

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

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
