"""The thread that drives a rank's machine: its stream, its beats, and what the wrapped function is told.

The machine is touched by this thread alone; the function's thread puts events into its inbox, and waits for verdicts.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol, Self

from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.run import FromWorker, ToWorker
from lighthouse_protocol.refusals import InternalError, LighthouseError

log = logging.getLogger(__name__)

CLOSES_WITHIN_S = 5.0
REPORT_INTERVAL_S = 0.1


class Stream(Protocol):
    """lighthouse_runtime.client.streams.RankStream is one."""

    def send(self, message: FromWorker) -> None: ...
    def cancel(self) -> None: ...
    def __iter__(self) -> Iterator[ToWorker]: ...


class Hands(Protocol):
    """What the thread does to the process."""

    def interrupt(self, reason: str) -> None:
        """End the function, without waiting for it."""
        ...

    def kill(self, reason: str) -> None: ...


class _Sign(Enum):
    TIME = "time has passed"
    LEAVE = "leave the run"


class RankThread:
    """A context manager, whose end leaves the run."""

    def __init__(self, machine: RankMachine, open_stream: Callable[[], Stream], hands: Hands) -> None:
        self._machine = machine
        self._open_stream = open_stream
        self._hands = hands
        self._inbox: queue.SimpleQueue[events.RankEvent | _Sign] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[events.Run | events.Ended] = queue.SimpleQueue()
        self._ended: events.Ended | None = None
        self._over = -1
        self._running = -1
        self._streams: dict[int, Stream] = {}
        self._step = 0
        self._steps_told = 0
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._live, name="lighthouse-rank", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(_Sign.LEAVE)
        self._thread.join(CLOSES_WITHIN_S)

    # -- for the function's thread

    def ready(self) -> None:
        """It runs nothing, or wants the next generation. `wait` must follow, and before the next `ready`."""
        self._inbox.put(events.Waiting())

    def wait(self) -> events.Run | events.Ended:
        """What is next, after `ready` or `returned`. Blocks while it is a spare, or not all are ready."""
        return self._ended or self._verdicts.get()

    def raised(self, reason: str) -> None:
        self._inbox.put(events.Raised(reason))

    def returned(self) -> None:
        self._inbox.put(events.Returned())

    def stepped(self, step: int) -> None:
        """Costs next to nothing, however often."""
        self._step = max(self._step, step)
        now = time.monotonic()
        if now - self._told_at >= REPORT_INTERVAL_S:
            self._told_at = now
            self._inbox.put(events.Stepped(self._step))

    def is_over(self, number: int) -> bool:
        """Whether that generation must not be run any more."""
        return self._over >= number or self._ended is not None

    # -- the thread

    def _live(self) -> None:
        try:
            self._perform(self._machine.start(time.monotonic()))
            while (event := self._next()) is not _Sign.LEAVE:
                self._tell_steps()
                now = time.monotonic()
                if isinstance(event, _Sign):
                    self._perform(self._machine.tick(now))
                else:
                    self._perform(self._machine.handle(event, now))
        except Exception as e:
            log.exception("this rank's thread has failed")
            self._perform([events.Ended(InternalError(f"the rank's thread has failed: {e}")), events.Interrupt(str(e))])
        finally:
            for stream in self._streams.values():
                stream.cancel()

    def _next(self) -> events.RankEvent | _Sign:
        now = time.monotonic()
        deadline = self._machine.deadline(now)
        try:
            return self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - now))
        except queue.Empty:
            return _Sign.TIME

    def _tell_steps(self) -> None:
        if self._step > self._steps_told:
            self._steps_told = self._step
            self._perform(self._machine.handle(events.Stepped(self._step), time.monotonic()))

    def _perform(self, effects: Sequence[events.RankEffect]) -> None:
        for effect in effects:
            match effect:
                case events.Connect(session):
                    self._connect(session)
                case events.Send(session, message):
                    if session in self._streams:
                        self._streams[session].send(message)
                case events.Disconnect(session):
                    self._drop(session)
                case events.Run():
                    self._running = effect.number
                    self._verdicts.put(effect)
                case events.Ended():
                    self._ended = effect
                    self._verdicts.put(effect)
                case events.Interrupt(reason):
                    self._over = self._running
                    self._hands.interrupt(reason)
                case events.Kill(reason):
                    self._hands.kill(reason)
                case events.StandBy(counters):
                    log.info("generation %d runs without this rank: it is a spare", counters.number)
                case events.LighthouseLost(reason):
                    log.warning("lighthouse lost: %s", reason)
                case events.LighthouseBack():
                    log.warning("lighthouse back")

    def _connect(self, session: int) -> None:
        for old in list(self._streams):
            self._drop(old)
        self._streams[session] = stream = self._open_stream()
        threading.Thread(target=self._read, args=(session, stream), name="lighthouse-stream", daemon=True).start()

    def _drop(self, session: int) -> None:
        stream = self._streams.pop(session, None)
        if stream is not None:
            stream.cancel()

    def _read(self, session: int, stream: Stream) -> None:
        """On a thread of the stream's own."""
        error: LighthouseError | None = None
        try:
            for message in stream:
                self._inbox.put(events.Heard(session, message))
        except LighthouseError as e:
            error = e
        except Exception as e:
            log.exception("the stream of this rank")
            error = InternalError(f"the stream has failed: {e}")
        self._inbox.put(events.Closed(session, error, random.random()))
