"""The thread that a rank's driver runs on: its streams, and what the wrapped function is told.

The driver is touched by this thread alone; the function's thread puts events into its inbox, and waits for verdicts.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol, Self

from agent_client.progress.progress import Progress
from agent_client.progress.self_report import SelfReporter
from agent_client.restart import driver
from agent_client.restart.interrupter import Interrupter
from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.evidence import EvidenceAsked
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import ToRunRank
from lighthouse_protocol.refusals import InternalError, LighthouseError

log = logging.getLogger(__name__)

CLOSES_WITHIN_S = 5.0
REPORT_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.5


class Stream(driver.Stream, Protocol):
    """lighthouse_runtime.client.streams.RankStream is one."""

    def __iter__(self) -> Iterator[ToRunRank]: ...


class _Sign(Enum):
    TIME = "time has passed"
    LEAVE = "leave the run"


class RankThread:
    """A context manager, whose end leaves the run."""

    def __init__(self, machine: RankMachine, open_stream: Callable[[], Stream], interrupter: Interrupter) -> None:
        self._driver = driver.RankDriver(machine, time.monotonic, self._connect, self)
        self._open_stream = open_stream
        self._interrupter = interrupter
        self._inbox: queue.SimpleQueue[events.RankEvent | _Sign] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[events.Run | events.Ended] = queue.SimpleQueue()
        self._ended: events.Ended | None = None
        self._over = -1
        self._running = -1
        self._step = 0
        self._steps_told = 0
        self._told_at = 0.0
        self._progress = Progress()  # of the function, in this generation
        self._sampled_at = 0.0
        self._reporter = SelfReporter()
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

    def stepped(self, step: int | None) -> None:
        """Costs next to nothing, however often. Steps that are not given are counted: in the process for the machine,
        whose step never falls; in the generation for the progress, so that ranks compare."""
        self._step = self._step + 1 if step is None else max(self._step, step)
        self._progress.step(self._progress.number + 1 if step is None else step)
        now = time.monotonic()
        if now - self._told_at >= REPORT_INTERVAL_S:
            self._told_at = now
            self._inbox.put(events.StepDone(self._step))

    def is_over(self, number: int) -> bool:
        """Whether that generation must not be run any more."""
        return self._over >= number or self._ended is not None

    # -- the thread

    def _live(self) -> None:
        try:
            self._driver.start()
            while (event := self._next()) is not _Sign.LEAVE:
                self._tell_steps()
                if isinstance(event, _Sign):
                    self._driver.tick()
                else:
                    self._driver.feed(event)
        except Exception as e:
            log.exception("this rank's thread has failed")
            self.end(events.Ended(InternalError(f"the rank's thread has failed: {e}")))
            self.interrupt(str(e))
        finally:
            self._driver.close()

    def _next(self) -> events.RankEvent | _Sign:
        deadline = self._driver.deadline()
        try:
            return self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return _Sign.TIME

    def _tell_steps(self) -> None:
        if self._step > self._steps_told:
            self._steps_told = self._step
            self._driver.feed(events.StepDone(self._step))

    # -- for the driver: the function, and its streams

    def run(self, run: events.Run) -> None:
        self._running = run.number
        self._progress, self._sampled_at = Progress(), 0.0
        self._verdicts.put(run)

    def sample(self) -> ProgressSample | None:
        now = time.monotonic()
        if now < self._sampled_at + SAMPLE_INTERVAL_S:
            return None
        self._sampled_at = now
        return self._progress.sample()

    def end(self, ended: events.Ended) -> None:
        self._ended = ended
        self._verdicts.put(ended)

    def interrupt(self, reason: str) -> None:
        self._over = self._running
        self._interrupter.interrupt(reason)

    def kill(self, reason: str) -> None:
        self._interrupter.kill(reason)

    def _connect(self, session: int) -> Stream:
        stream = self._open_stream()
        threading.Thread(target=self._read, args=(session, stream), name="lighthouse-stream", daemon=True).start()
        return stream

    def _read(self, session: int, stream: Stream) -> None:
        """On a thread of the stream's own."""
        error: LighthouseError | None = None
        try:
            for message in stream:
                if isinstance(message, EvidenceAsked):
                    self._reporter.answer(message.number, stream.send)
                self._inbox.put(events.MessageReceived(session, message))
        except LighthouseError as e:
            error = e
        except Exception as e:
            log.exception("the stream of this rank")
            error = InternalError(f"the stream has failed: {e}")
        self._inbox.put(events.StreamClosed(session, error, random.random()))
