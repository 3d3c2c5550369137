"""How a generation that is over is ended in this process: by an exception, and aborts; or the process.

The exception comes first. A kernel of NCCL that is aborted looks as if it had completed, with anything in its tensors:
no line of the function may run after that, least of all one that saves a checkpoint. Aborts may take long or hang, so
they run on a thread of their own. What they abort belongs to the generation that is over, so the next one begins after
them.
"""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from agent_client.restart.async_exception import InterruptibleSection

log = logging.getLogger(__name__)

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
