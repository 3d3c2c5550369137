"""Reports to the manager, at once, the exception by which a rank ends.

Such an exception is uncaught, or leaves the `with` block of the Agent. A forked child reports nothing for its parent.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType

from agent_client.errors import GroupDrained


class ExitReport:
    """Calls `report` at most once. It stands in sys.excepthook from `install` to `uninstall`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._pid = os.getpid()
        self._is_over = False
        self._before = sys.excepthook
        self._hook = self._on_uncaught

    def install(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self._hook

    def uninstall(self) -> None:
        """If another hook was installed since, it stays, and this one passes on."""
        self._is_over = True
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def send(self, error: BaseException | None) -> None:
        """Report a failure: a clean exit and a drained group are none."""
        is_good = error is None or isinstance(error, GroupDrained) or (isinstance(error, SystemExit) and not error.code)
        if is_good or self._is_over or os.getpid() != self._pid:
            return
        self._is_over = True
        self._report(f"{type(error).__name__}: {error}".rstrip(": "))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.send(error)
        finally:
            self._before(kind, error, trace)
