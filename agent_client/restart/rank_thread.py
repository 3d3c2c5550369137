"""What a wrapped function is told by its rank's driver, and tells it: verdicts, steps, interruptions."""

import queue
import time
from collections.abc import Callable
from typing import Self

from agent_client.progress.progress import Progress
from agent_client.progress.self_report import SelfReporter
from agent_client.restart.driver_thread import DriverThread, Stream
from agent_client.restart.interrupter import Interrupter
from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.evidence import EvidenceAsked
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import RankHeartbeat, ToRunRank
from lighthouse_protocol.refusals import InternalError

REPORT_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.5


class RankThread:
    """A context manager, whose end leaves the run."""

    def __init__(self, machine: RankMachine, open_stream: Callable[[], Stream], interrupter: Interrupter) -> None:
        self._thread = DriverThread(machine, open_stream, self, self._failed, self._hear, self._tell_steps)
        self._interrupter = interrupter
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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.leave()

    # -- for the function's thread

    def ready(self) -> None:
        """It runs nothing, or wants the next generation. `wait` must follow, and before the next `ready`."""
        self._thread.put(events.Waiting())

    def wait(self) -> events.Run | events.Ended:
        """What is next, after `ready` or `returned`. Blocks while it is a spare, or not all are ready."""
        return self._ended or self._verdicts.get()

    def raised(self, reason: str) -> None:
        self._thread.put(events.Raised(reason))

    def returned(self) -> None:
        self._thread.put(events.Returned())

    def stepped(self, step: int | None) -> None:
        """Costs next to nothing, however often. Steps that are not given are counted: in the process for the machine,
        whose step never falls; in the generation for the progress, so that ranks compare."""
        self._step = self._step + 1 if step is None else max(self._step, step)
        self._progress.step(self._progress.number + 1 if step is None else step)
        now = time.monotonic()
        if now - self._told_at >= REPORT_INTERVAL_S:
            self._told_at = now
            self._thread.put(events.StepDone(self._step))

    def is_over(self, number: int) -> bool:
        """Whether that generation must not be run any more."""
        return self._over >= number or self._ended is not None

    # -- on the driver's thread, and on its streams'

    def _failed(self, error: InternalError) -> None:
        self.end(events.Ended(error))
        self.interrupt(str(error))

    def _tell_steps(self) -> None:
        if self._step > self._steps_told:
            self._steps_told = self._step
            self._thread.driver.feed(events.StepDone(self._step))

    def _hear(self, message: ToRunRank, stream: Stream) -> None:
        if isinstance(message, EvidenceAsked):
            stream.send(RankHeartbeat(progress=self._progress.sample()))  # it is judged by where it is now
            self._reporter.answer(message.number, stream.send)

    # -- for the driver: the function

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
