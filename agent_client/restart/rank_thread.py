"""Threads of a rank in a run, and `fork_and_monitor`, which puts a plain script under a supervisor.

`DriverThread` runs the state machine, and `RankThread` adds the interface for a wrapped function. Only one thread uses
the driver. Other threads put their events into its inbox. A separate thread reads each stream.
"""

import json
import logging
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_client.errors import ConfigurationError
from agent_client.progress.progress import Progress
from agent_client.progress.script_groups import SelfReporter
from agent_client.restart.driver import Process, RankDriver, Stream
from agent_client.restart.interrupter import Interrupter, Interruption
from agent_client.restart.options import NO_NAME, Launch, Options
from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from agent_client.restart.store import RestartAbort, State, last_generation, present_runs
from agent_client.step.observer import stop_observing
from lighthouse_protocol.messages.incident import EvidenceAsked
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import RankHeartbeat, RunCompleted, ToRunRank
from lighthouse_protocol.refusals import InternalError, LighthouseError
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.process.commands import START_MANAGER

log = logging.getLogger(__name__)


CLOSES_WITHIN_S = 5.0


class DriverThread(Process):
    """Runs a rank's state machine on a separate thread. The driver calls the methods of `Process` on that thread."""

    def __init__(self, machine: RankMachine, open_stream: Callable[[], Stream]) -> None:
        self.machine = machine
        self.driver = RankDriver(machine, self)
        self._open_stream = open_stream
        self._reporter = SelfReporter()
        self._inbox: queue.SimpleQueue[events.RankEvent | None] = queue.SimpleQueue()
        """Events for the state machine. None makes the thread leave the run."""
        self._thread = threading.Thread(target=self._live, name="lighthouse-rank", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: events.RankEvent) -> None:
        self._inbox.put(event)

    def leave(self) -> None:
        """Leave the run. The thread then cancels the stream, so the lighthouse notices immediately."""
        self._inbox.put(None)
        self._thread.join(CLOSES_WITHIN_S)

    def now(self) -> float:
        return time.monotonic()

    def connect(self, session: int) -> Stream:
        stream = self._open_stream()
        threading.Thread(target=self._read, args=(session, stream), name="lighthouse-stream", daemon=True).start()
        return stream

    def end_with_error(self, error: InternalError) -> None:
        self.end_run(events.Ended(error))

    def preview_message(self, message: ToRunRank, stream: Stream) -> None:
        """Handle a message on the thread that reads the stream, before the driver receives the message."""
        if isinstance(message, EvidenceAsked):
            self._reporter.send_evidence(message.number, stream.send)

    def before_event(self) -> None:
        pass

    def _live(self) -> None:
        try:
            self.driver.start()
            while True:
                deadline = self.driver.deadline()
                try:
                    event = self._inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    self.before_event()
                    self.driver.tick()
                    continue
                if event is None:
                    return
                self.before_event()
                self.driver.feed(event)
        except Exception as e:
            log.exception("the thread of this rank failed")
            self.end_with_error(InternalError(f"the rank's thread has failed: {e}"))
        finally:
            self.driver.close()

    def _read(self, session: int, stream: Stream) -> None:
        error: LighthouseError | None = None
        try:
            for message in stream:
                self.preview_message(message, stream)
                self._inbox.put(events.MessageReceived(session, message))
        except LighthouseError as e:
            error = e
        except Exception as e:
            log.exception("the stream of this rank failed")
            error = InternalError(f"the stream has failed: {e}")
        self._inbox.put(events.StreamClosed(session, error, random.random()))


REPORT_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.5

_completed: set[tuple[str, str, str]] = set()
"""(lighthouse, job, run) of the runs that were completed while this process took part in them."""


class RankThread(DriverThread):
    """Connects a wrapped function to its run, on a separate thread. Exiting the context leaves the run."""

    def __init__(self, options: Options, launch: Launch, interrupter: Interrupter, state: State) -> None:
        if not launch.lighthouse:
            raise ConfigurationError("LIGHTHOUSE_ADDRESS is not set; use_global_iteration=True needs a lighthouse")
        self._key = (launch.lighthouse, launch.job, launch.run)
        if self._key in _completed:
            raise ConfigurationError(f"run {launch.run!r} is complete; set another LIGHTHOUSE_RUN_ID for the next")
        self.client = LighthouseClient(launch.lighthouse, job=launch.job, run=launch.run)
        self.run_id = launch.run
        self.slot = launch.slot
        self.secret = launch.secret
        self.timeout_s = options.store_timeout_s
        self.state = state
        super().__init__(RankMachine(launch.entry(options.terms(launch)), options.rank_config()), self.client.rank)
        self._launch = launch
        self._interrupter = interrupter
        self._previous: int | None = None
        self._orders: queue.SimpleQueue[events.Run | events.Ended] = queue.SimpleQueue()
        self._ended: events.Ended | None = None
        self._over = -1
        self._running = -1
        self._step = 0
        self._steps_reported = 0
        self._reported_at = 0.0
        self._progress = Progress()  # progress of the function in this generation
        self._sampled_at = 0.0

    def __enter__(self) -> Self:
        if self._launch.attempt > 0:
            try:
                self._previous = last_generation(self.client, self.run_id, self.slot, self.timeout_s)
            except LighthouseError as e:
                log.info("the previous generation is unknown: %s", e)
        present_runs.append(self)
        stop_observing()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(e, SystemExit | KeyboardInterrupt):
            self._stop_run(e)
        self.leave()
        present_runs.remove(self)
        self.client.close()

    # -- for the function's thread

    def ready(self) -> None:
        self.put(events.Waiting())

    def next_order(self) -> events.Run | events.Ended:
        """Return the next generation to run, or the outcome if the run has ended.

        The call blocks while this rank is a spare or other ranks are not ready.
        """
        order = self._ended or self._orders.get()
        if isinstance(order, events.Ended) and isinstance(order.outcome, RunCompleted):
            _completed.add(self._key)
        return order

    def begin_generation(self, run: events.Run) -> None:
        """Set the rank and world size of a new generation. Log its number if it follows a restart."""
        self.state.begin_generation(run.counters, run.rank, run.world_size)
        if self._previous is not None or self._launch.attempt > 0:
            previous = "unknown" if self._previous is None else self._previous
            log.info("Rank %d: Restart complete. Previous: %s, Current: %d", run.rank, previous, run.number)
        self._previous = run.number

    def advance(self) -> int:
        """Request the next generation for the running function, and wait until this rank is active in a generation."""
        self._interrupter.disarm()
        self.ready()
        order = self.next_order()
        if isinstance(order, events.Ended):
            raise Interruption
        self.begin_generation(order)
        self._interrupter.arm()
        return order.number

    def raised(self, reason: str) -> None:
        self.put(events.Raised(reason))

    def returned(self) -> None:
        self.put(events.Returned())

    def stepped(self, step: int | None) -> None:
        """Record a step. If `step` is None, it is one more than the last step.

        The state machine receives the highest step since the process started, because its step must not decrease. The
        progress report contains the step in this generation, so that ranks can be compared.
        """
        self._step = self._step + 1 if step is None else max(self._step, step)
        self._progress.step(self._progress.number + 1 if step is None else step)
        now = time.monotonic()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self.put(events.StepDone(self._step))

    def is_over(self, number: int) -> bool:
        return self._over >= number or self._ended is not None

    def _stop_run(self, end: SystemExit | KeyboardInterrupt) -> None:
        """Stop the run on all ranks if `end` is a KeyboardInterrupt, or has the exit code of RestartAbort.

        A supervisor sees the exit of this process, and stops the run itself. Under a supervisor, this method only
        writes the reason of a RestartAbort to the file that TORCHELASTIC_ERROR_FILE names, which the supervisor reads.
        """
        if self._launch.is_supervised:
            path = os.environ.get("TORCHELASTIC_ERROR_FILE")
            if isinstance(end, RestartAbort) and path is not None:
                try:
                    Path(path).write_text(json.dumps({"message": f"RestartAbort: {end.reason}"}))
                except OSError as e:
                    log.warning("cannot report to the supervisor why this rank ends the run (%s): %s", end.reason, e)
            return
        if isinstance(end, KeyboardInterrupt) or end.code == RestartAbort().code:
            reason = f"rank {self.state.rank}: {end if str(end) else 'interrupted'}"
            try:
                self.client.stop_run(reason, timeout_s=self.timeout_s)
            except LighthouseError as e:
                log.warning("cannot ask the other ranks to stop (%s): %s", reason, e)

    # -- called on the driver's thread and on the streams' threads

    def end_with_error(self, error: InternalError) -> None:
        super().end_with_error(error)
        self.interrupt(str(error))

    def before_event(self) -> None:
        if self._step > self._steps_reported:
            self._steps_reported = self._step
            self.driver.feed(events.StepDone(self._step))

    def preview_message(self, message: ToRunRank, stream: Stream) -> None:
        if isinstance(message, EvidenceAsked):
            stream.send(RankHeartbeat(progress=self._progress.sample()))  # the verdict needs the current position
        super().preview_message(message, stream)

    def run_generation(self, run: events.Run) -> None:
        self._running = run.number
        self._progress, self._sampled_at = Progress(), 0.0
        self._orders.put(run)

    def sample(self) -> ProgressSample | None:
        now = time.monotonic()
        if now < self._sampled_at + SAMPLE_INTERVAL_S:
            return None
        self._sampled_at = now
        return self._progress.sample()

    def end_run(self, ended: events.Ended) -> None:
        self._ended = ended
        self._orders.put(ended)

    def interrupt(self, reason: str) -> None:
        self._over = self._running
        self._interrupter.interrupt(reason)

    def kill(self, reason: str) -> None:
        self._interrupter.kill(reason)


def fork_and_monitor(*options: str) -> None:
    """Put this script under a supervisor.

    Call this at the beginning of the script. The process becomes `lighthouse-manager run`, which starts the script
    again in a child process. In the child, the call returns immediately. Code before the call runs in both processes.
    LIGHTHOUSE_ADDRESS and REPLICA_GROUP_ID set the lighthouse and the replica group. Under torchrun, each rank gets its
    own supervisor. Pass `--max-restarts=0` to torchrun.

    Args:
        *options: Options for `lighthouse-manager run`, such as "--max-restarts", "10".

    Raises:
        ConfigurationError: No lighthouse is set, or torchrun is set to restart ranks itself.

    Example:
        ```python
        from agent_client import fork_and_monitor

        fork_and_monitor("--max-restarts", "10")
        import torch  # from here on, the code runs only in the supervised child
        ```
    """
    launch = Launch.read()
    if launch.is_supervised:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # exec discards imported modules and allocated memory, including CUDA's.
    own = command(launch, os.environ, [sys.executable, *sys.orig_argv[1:]], options)
    # Do not use -m, which would find a module of the same name in the script's folder.
    os.execv(sys.executable, [sys.executable, "-P", "-c", START_MANAGER, *own])


def command(
    launch: Launch, variables: Mapping[str, str], invocation: Sequence[str], options: Sequence[str]
) -> list[str]:
    """Return the arguments with which `lighthouse-manager` runs this script under a supervisor.

    `variables` are the environment variables. `invocation` is the command that started this interpreter, and `options`
    are additional options for the supervisor. Raise ConfigurationError for the reasons that `fork_and_monitor` lists.
    """
    if not launch.lighthouse:
        raise ConfigurationError("LIGHTHOUSE_ADDRESS is not set; fork_and_monitor() needs a running lighthouse")
    if (restarts := variables.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0":
        raise ConfigurationError(
            f"torchrun --max-restarts={restarts}: only one of the two may restart the ranks; give torchrun "
            "--max-restarts=0, and fork_and_monitor() the option --max-restarts"
        )
    words = ["run", "--nproc-per-node", "1", "--group-world-size", "1"]
    if variables.get("TORCHELASTIC_RUN_ID") == NO_NAME and not variables.get("LIGHTHOUSE_RUN_ID"):
        words += ["--run-id", launch.run]
    if launch.slots > 1:  # each rank of the run has its own supervisor, which treats it as a replica group
        words += ["--slot-offset", str(launch.slot), "--run-world-size", str(launch.slots)]
        words += ["--replica-id", f"{variables.get('REPLICA_GROUP_ID') or 'rank'}-{launch.slot}"]
        words += ["--bind", "[::]:0"] if "LIGHTHOUSE_MANAGER_BIND" not in variables else []
        words += ["--master-addr", variables.get("MASTER_ADDR") or "127.0.0.1"]
    elif not variables.get("REPLICA_GROUP_ID"):
        words += ["--replica-id", "monitored"]
    return [*words, *options, "--", *invocation]
