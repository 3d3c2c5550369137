"""The loop's side of requests for a quorum that wait: what for goes to the log, and to the ranks, once that lasts.

A level, not an edge: a watch that is opened is told what holds.
"""

import asyncio
import logging
from collections.abc import Callable

from lighthouse_protocol.messages.session import Waiting
from lighthouse_protocol.rules.quorum_wait import LOOKED_EVERY_S, QuorumWait
from lighthouse_protocol.wire.streams import WATCH_RESPONSES
from lighthouse_runtime.server.streams import Sender

log = logging.getLogger(__name__)


class Waits:
    """`waiting_for` says it, in words; it is asked only while requests wait."""

    def __init__(self, waiting_for: Callable[[], str]) -> None:
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._told = ""
        self._senders: dict[int, Sender] = {}
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, watch: int, sender: Sender) -> None:
        self._senders[watch] = sender
        if self._told:
            sender.send(WATCH_RESPONSES.write(Waiting(self._told)))

    def ended(self, watch: int) -> None:
        self._senders.pop(watch, None)

    def answered(self) -> None:
        """A request was answered with a quorum."""
        if line := self._wait.answered(asyncio.get_running_loop().time()):
            log.info("%s", line)

    def look(self, *, is_waiting: bool) -> None:
        loop = asyncio.get_running_loop()
        if not is_waiting:
            self._wait.leave(loop.time())
            self.close()
            self._tell("")
        elif self._timer is None or not self._wait.is_under_way:
            self.close()
            self._wait.begin(loop.time())
            self._timer = loop.call_later(LOOKED_EVERY_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        waiting_for = self._waiting_for()
        if line := self._wait.news(waiting_for, loop.time()):
            log.info("%s", line)
        self._tell(waiting_for)
        self._timer = loop.call_later(LOOKED_EVERY_S, self._look)

    def _tell(self, waiting_for: str) -> None:
        if waiting_for == self._told:
            return
        self._told = waiting_for
        message = WATCH_RESPONSES.write(Waiting(waiting_for))
        for sender in self._senders.values():
            sender.send(message)
