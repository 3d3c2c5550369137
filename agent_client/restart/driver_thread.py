"""The thread that a rank's driver runs on, and those that read its streams.

The driver is touched by this thread alone; what others have to tell it, they put into its inbox.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol

from agent_client.restart import driver
from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.run import ToRunRank
from lighthouse_protocol.refusals import InternalError, LighthouseError

log = logging.getLogger(__name__)

CLOSES_WITHIN_S = 5.0


class Stream(driver.Stream, Protocol):
    """lighthouse_runtime.client.streams.RankStream is one."""

    def __iter__(self) -> Iterator[ToRunRank]: ...


class _Sign(Enum):
    TIME = "time has passed"
    LEAVE = "leave the run"


class DriverThread:
    """`function` is called on this thread. `hear` is given each message on the thread that reads it, before the driver
    is; `before_each` is called before the driver is fed. `failed` is called if this thread fails, which is a defect."""

    def __init__(
        self,
        machine: RankMachine,
        open_stream: Callable[[], Stream],
        function: driver.Function,
        failed: Callable[[InternalError], None],
        hear: Callable[[ToRunRank, Stream], None] = lambda message, stream: None,
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.driver = driver.RankDriver(machine, time.monotonic, self._connect, function)
        self._open_stream = open_stream
        self._failed = failed
        self._hear = hear
        self._before_each = before_each
        self._inbox: queue.SimpleQueue[events.RankEvent | _Sign] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="lighthouse-rank", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: events.RankEvent) -> None:
        self._inbox.put(event)

    def leave(self) -> None:
        """The run: the stream is given up, and the lighthouse knows it at once."""
        self._inbox.put(_Sign.LEAVE)
        self._thread.join(CLOSES_WITHIN_S)

    def _live(self) -> None:
        try:
            self.driver.start()
            while (event := self._next()) is not _Sign.LEAVE:
                self._before_each()
                if isinstance(event, _Sign):
                    self.driver.tick()
                else:
                    self.driver.feed(event)
        except Exception as e:
            log.exception("the thread of this rank failed")
            self._failed(InternalError(f"the rank's thread has failed: {e}"))
        finally:
            self.driver.close()

    def _next(self) -> events.RankEvent | _Sign:
        deadline = self.driver.deadline()
        try:
            return self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return _Sign.TIME

    def _connect(self, session: int) -> Stream:
        stream = self._open_stream()
        threading.Thread(target=self._read, args=(session, stream), name="lighthouse-stream", daemon=True).start()
        return stream

    def _read(self, session: int, stream: Stream) -> None:
        """On a thread of the stream's own."""
        error: LighthouseError | None = None
        try:
            for message in stream:
                self._hear(message, stream)
                self._inbox.put(events.MessageReceived(session, message))
        except LighthouseError as e:
            error = e
        except Exception as e:
            log.exception("the stream of this rank failed")
            error = InternalError(f"the stream has failed: {e}")
        self._inbox.put(events.StreamClosed(session, error, random.random()))
