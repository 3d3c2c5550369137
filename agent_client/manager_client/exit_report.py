"""What a rank says before it dies of an exception: its manager is told at once, and why.

An exception ends a rank where nobody catches it, or where it leaves the agent's block. A child that was forked has
nothing to say for its parent.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType

from agent_client.errors import GroupDrained


class ExitReport:
    """`say` is called at most once. Stands in sys.excepthook from `listen` to `fall_silent`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pid = os.getpid()
        self._has_spoken = False
        self._before = sys.excepthook
        self._hook = self._on_uncaught

    def listen(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self._hook

    def fall_silent(self) -> None:
        """A hook that somebody has put before this one stays, and this one passes on."""
        self._has_spoken = True
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def speak(self, error: BaseException | None) -> None:
        """Of a failure: neither a good exit nor a drained group is one."""
        is_good = error is None or isinstance(error, GroupDrained) or (isinstance(error, SystemExit) and not error.code)
        if is_good or self._has_spoken or os.getpid() != self._pid:
            return
        self._has_spoken = True
        self._say(f"{type(error).__name__}: {error}".rstrip(": "))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.speak(error)
        finally:
            self._before(kind, error, trace)
