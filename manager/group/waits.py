"""Requests for a quorum that wait: if that lasts, the log and the ranks are told what for.

A level, not an edge: a new watch is told what holds.
"""

import logging
from collections.abc import Callable

from lighthouse_protocol.messages.session import Waiting
from lighthouse_protocol.rules.quorum_wait import LOOKED_EVERY_S, QuorumWait
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer
from manager.group.watches import Watch, WatchTable

log = logging.getLogger(__name__)


class Waits:
    """`waiting_for` says what for, in words; it is called only while requests wait."""

    def __init__(self, timers: Timers, watches: WatchTable, waiting_for: Callable[[], str]) -> None:
        self._clock = timers.time
        self._watches = watches
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._told = ""
        self._timer = DeadlineTimer(self._look, timers)

    def opened(self, watch: Watch) -> None:
        if self._told:
            watch.peer.send(Waiting(self._told))

    def answered(self) -> None:
        """A request was answered with a quorum."""
        if line := self._wait.answered(self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))

    def begin(self) -> None:
        """A request waits, and it is the first, or those before it were answered."""
        self._wait.begin(self._clock())
        self._timer.set_after(LOOKED_EVERY_S)

    def end(self) -> None:
        """No request waits."""
        self.close()
        self._wait.leave(self._clock())
        self._tell("")

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        waiting_for = self._waiting_for()
        if line := self._wait.news(waiting_for, self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))
        self._tell(waiting_for)
        self._timer.set_after(LOOKED_EVERY_S)

    def _tell(self, waiting_for: str) -> None:
        if waiting_for != self._told:
            self._told = waiting_for
            self._watches.send_all(Waiting(waiting_for))
