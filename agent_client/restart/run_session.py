"""A wrapped function's session in its run: the client, the thread of the rank, and the values that StoreMixin reads.

While a generation runs, `RankEnvironment` sets this rank's place in the State and in RANK and WORLD_SIZE.
"""

import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_client.errors import ConfigurationError
from agent_client.restart.interrupter import Interrupter, Interruption
from agent_client.restart.options import Launch, Options
from agent_client.restart.rank_thread import RankThread
from agent_client.restart.rules.events import Ended, Run
from agent_client.restart.rules.machine import RankMachine
from agent_client.restart.store import RestartAbort, State, last_generation, present_runs
from agent_client.step.observer import stop_observing
from lighthouse_protocol.messages.run import RunCompleted
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.client.clients import LighthouseClient

log = logging.getLogger(__name__)


_NAMES = ("RANK", "WORLD_SIZE")


class RankEnvironment:
    """Context manager that restores RANK and WORLD_SIZE at its end."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> "RankEnvironment":
        self._before = {name: os.environ.get(name) for name in _NAMES}
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def take(self, run: Run) -> None:
        """Set the place of this rank in a new generation."""
        self.state.take(run.counters, run.rank, run.world_size)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(run.rank), str(run.world_size)


_completed: set[tuple[str, str, str]] = set()
"""Lighthouse, job and name of the runs that this process has seen complete."""


class RunSession:
    """Context manager around the context of its `thread`."""

    def __init__(
        self, options: Options, launch: Launch, interrupter: Interrupter, environment: RankEnvironment
    ) -> None:
        """Prepare the session without connecting.

        Raises:
            ConfigurationError: No lighthouse is set, or this process has completed the run already.
        """
        if not launch.lighthouse:
            raise ConfigurationError("LIGHTHOUSE_ADDRESS is not set; use_global_iteration=True needs a lighthouse")
        self._key = (launch.lighthouse, launch.job, launch.run)
        if self._key in _completed:
            raise ConfigurationError(f"run {launch.run!r} is complete; set another LIGHTHOUSE_RUN_ID for the next")
        self.client = LighthouseClient(launch.lighthouse, job=launch.job, run=launch.run)
        self.run = launch.run
        self.slot = launch.slot
        self.secret = launch.secret
        self.timeout_s = options.store_timeout_s
        self._launch = launch
        self._environment = environment
        self._interrupter = interrupter
        machine = RankMachine(launch.entry(options.terms(launch)), options.rank_config())
        self.thread = RankThread(machine, self.client.rank, interrupter)
        self._previous: int | None = None

    def __enter__(self) -> Self:
        if self._launch.attempt > 0:
            self._previous = self._last_generation()
        present_runs.append(self)
        stop_observing()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        present_runs.remove(self)
        self.client.close()

    @property
    def iteration(self) -> int:
        return self._environment.state.iteration

    def began(self, run: Run) -> None:
        """Log a generation that follows a restart."""
        if self._previous is not None or self._launch.attempt > 0:
            previous = "unknown" if self._previous is None else self._previous
            log.info("Rank %d: Restart complete. Previous: %s, Current: %d", run.rank, previous, run.number)
        self._previous = run.number

    def advance(self) -> int:
        """Wait for the next generation, at the request of the function. A spare waits here, too."""
        self._interrupter.end()
        self.thread.ready()
        verdict = self.thread.wait()
        if isinstance(verdict, Ended):
            raise Interruption
        self._environment.take(verdict)
        self.began(verdict)
        self._interrupter.begin()
        return verdict.number

    def ended(self, verdict: Ended) -> None:
        if isinstance(verdict.outcome, RunCompleted):
            _completed.add(self._key)

    def abort(self, end: SystemExit | KeyboardInterrupt) -> None:
        """Stop the run when this process ends by RestartAbort, an exit with its code, or KeyboardInterrupt.

        A supervisor sees the end of the process itself, so it only needs the reason.
        """
        asks = isinstance(end, KeyboardInterrupt) or end.code == RestartAbort().code
        if self._launch.is_supervised and isinstance(end, RestartAbort):
            _leave_reason(end)
        if self._launch.is_supervised or not asks:
            return
        reason = f"rank {self._environment.state.rank}: {end if str(end) else 'interrupted'}"
        try:
            self.client.stop_run(reason, timeout_s=self.timeout_s)
        except LighthouseError as e:
            log.warning("cannot ask the other ranks to stop (%s): %s", reason, e)

    def _last_generation(self) -> int | None:
        """Return the last generation of this slot's previous process, for the log."""
        try:
            return last_generation(self.client, self.run, self.slot, self.timeout_s)
        except LighthouseError as e:
            log.info("the previous generation is unknown: %s", e)
            return None


def _leave_reason(end: RestartAbort) -> None:
    """Write the error file that torch's @record would write. The supervisor reads it when the process has ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps({"message": f"RestartAbort: {end.reason}"}))
    except OSError as e:
        log.warning("cannot report to the supervisor why this rank ends the run (%s): %s", end.reason, e)
