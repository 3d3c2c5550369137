"""Driver of a rank's state machine: feeds events to the state machine, and performs its effects in order.

The driver is synchronous, and performs I/O only through the interfaces `Stream` and `Process`, so a simulator can run
the same code.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from agent_client.restart.rules import events
from agent_client.restart.rules.events import RankPhase
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import FromRunRank, RankHeartbeat, ToRunRank

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Stream of messages between a rank and the lighthouse.

    The `Process` that has opened the stream reads it, and feeds each message and the stream's end to the driver.
    """

    def __iter__(self) -> Iterator[ToRunRank]: ...

    def send(self, message: FromRunRank) -> None: ...

    def cancel(self) -> None: ...


class Process(Protocol):
    def now(self) -> float: ...

    def connect(self, session: int) -> Stream: ...

    def run_generation(self, run: events.Run) -> None: ...

    def end_run(self, ended: events.Ended) -> None: ...

    def sample(self) -> ProgressSample | None:
        """Return the wrapped function's progress for a heartbeat, or None if the last sample is still recent enough."""
        ...

    def interrupt(self, reason: str) -> None: ...

    def kill(self, reason: str) -> None: ...


class RankDriver:
    def __init__(self, machine: RankMachine, process: Process) -> None:
        self.machine = machine
        self._process = process
        self._stream: tuple[int, Stream] | None = None

    def start(self) -> None:
        self._perform(self.machine.start(self._process.now()))

    def feed(self, event: events.RankEvent) -> None:
        self._perform(self.machine.handle(event, self._process.now()))

    def tick(self) -> None:
        self._perform(self.machine.tick(self._process.now()))

    def deadline(self) -> float | None:
        return self.machine.deadline(self._process.now())

    def _perform(self, effects: Sequence[events.RankEffect]) -> None:
        for effect in effects:
            match effect:
                case events.Connect(session):
                    self.close()
                    self._stream = session, self._process.connect(session)
                case events.Send(session, message):
                    if self._stream is not None and self._stream[0] == session:
                        if isinstance(message, RankHeartbeat) and self.machine.phase is RankPhase.RUNNING:
                            message = replace(message, progress=self._process.sample())
                        self._stream[1].send(message)
                case events.Disconnect(session):
                    if self._stream is not None and self._stream[0] == session:
                        self.close()
                case events.Run():
                    self._process.run_generation(effect)
                case events.Ended():
                    self._process.end_run(effect)
                case events.Interrupt(reason):
                    self._process.interrupt(reason)
                case events.Kill(reason):
                    self._process.kill(reason)
                case events.Notice(text, is_warning):
                    log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)

    def close(self) -> None:
        if self._stream is not None:
            self._stream[1].cancel()
            self._stream = None
