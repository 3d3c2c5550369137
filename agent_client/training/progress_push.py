"""Pushes a job's progress to a webhook, W&B or MLflow, without delaying a step.

Only group rank 0 of the quorum's first replica group pushes. Each push runs on a separate thread. While a push
is running, no other starts, so a slow receiver gets fewer pushes.
"""

import asyncio
import importlib.util
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from agent_client.errors import ConfigurationError, first_line
from agent_client.step.rules.rates import Commit, StepRates
from lighthouse_runtime.net.address import is_http_url
from lighthouse_runtime.web.webhook import ANSWERED_WITHIN_S, post_json, shown_url

if TYPE_CHECKING:
    from agent_client.step.agent import Agent

log = logging.getLogger(__name__)

Values: TypeAlias = dict[str, Any]
Send: TypeAlias = Callable[[Values], object]
STUCK_AFTER_S = 60.0
"""Time in seconds for which a running push may delay the next one before this is logged."""


def push_progress(agent: "Agent", to: str | Send, *, every_s: float = 30.0, steps: int | None = None) -> None:
    """Push the job's progress after committed steps. Call this once per receiver, on all ranks.

    Only group rank 0 of the quorum's first replica group pushes, so the receiver gets one stream of values, even if
    groups come and go. Pushes run in the background. An error from the receiver is logged, and never affects a step.
    `agent.close()` pushes the last values, and waits up to 10 s for the receiver.

    The values are `step`, `participants` (number of replica groups), `steps_per_s` since the last push, `goodput`
    (share of the time in committed steps, since this rank's first one) and, with `steps`, the estimated `left_s` and
    `ends_at_unix_s`. Values that are not known yet are left out.

    Args:
        agent: The Agent of this rank.
        to: An http or https URL, which receives the values and `replica_id` as JSON. `"wandb"` or `"mlflow"`, whose
            active run on this rank receives them with the prefix `lighthouse/`. Or a function, which is called with a
            dict on a background thread.
        every_s: Minimum time between two pushes in seconds.
        steps: Number of steps after which training ends.

    Raises:
        ConfigurationError: An argument has an invalid value, or the named library is not installed.

    Example:
        ```python
        push_progress(agent, "https://hooks.example/training", steps=100_000)
        ```
    """
    if not (every_s > 0 and math.isfinite(every_s)):
        raise ConfigurationError(f"every_s: {every_s} is not a positive number of seconds")
    if steps is not None and steps < 1:
        raise ConfigurationError(f"steps: {steps} is not at least 1")
    if isinstance(to, str) and to in ("wandb", "mlflow"):
        if importlib.util.find_spec(to) is None:
            raise ConfigurationError(f"{to} is not installed: pip install {to}")
    elif not (is_http_url(to) if isinstance(to, str) else callable(to)):
        raise ConfigurationError(f"to: {to!r} is not an http or https URL, wandb, mlflow or a function")
    agent.on_commit(ProgressPush(agent, to, every_s, steps).note_commit)


class ProgressPush:
    """Measures the commits of one Agent, and pushes the values to one receiver."""

    def __init__(self, agent: "Agent", to: str | Send, every_s: float, steps: int | None) -> None:
        self._agent, self._to, self._every_s, self._steps = agent, to, every_s, steps
        self._shown = shown_url(to) if isinstance(to, str) and "://" in to else to
        self._rates: StepRates | None = None
        self._pushed: Commit | None = None
        self._push: threading.Thread | None = None
        self._next_at = time.monotonic() + every_s
        self._error = ""
        agent.internals.attached.add(self)

    def note_commit(self, step: int) -> None:
        now = time.monotonic()
        commit = Commit(step, self._agent.internals.machine.ended, self._agent.quorum_id, now)
        if self._rates is None or step <= self._rates.last.step:  # the job has fallen back to an older state
            self._rates, self._pushed = StepRates(commit, commit), None
        else:
            self._rates.add(commit)
        if now >= self._next_at:
            self._start_push(self._rates, now)

    def close(self) -> None:
        """Push the last values. Wait up to ANSWERED_WITHIN_S for each push in progress."""
        for _ in range(2):
            if self._push is not None:
                self._push.join(ANSWERED_WITHIN_S)
            if self._rates is not None and self._rates.last != self._pushed:
                self._start_push(self._rates, time.monotonic())

    def _start_push(self, rates: StepRates, now: float) -> None:
        quorum = self._agent.internals.runner.last
        if self._agent.group_rank != 0 or quorum is None or quorum.replica_rank != 0:
            return
        if self._push is not None and self._push.is_alive():
            if now >= self._next_at + STUCK_AFTER_S:
                self._log_push_error(f"the last push is still running {STUCK_AFTER_S:g} s after the next one was due")
            return
        self._next_at = now + self._every_s
        rate, mean = rates.last.rate_since(self._pushed or rates.first), rates.last.rate_since(rates.first)
        values: Values = {"step": rates.last.step, "participants": quorum.replica_world_size}
        values |= {} if rate is None else {"steps_per_s": rate, "goodput": rates.goodput}
        if self._steps is not None and mean:
            left_s = max(0, self._steps - rates.last.step) / mean
            values |= {"left_s": left_s, "ends_at_unix_s": time.time() + left_s}
        try:
            send = self._receiver(quorum.replica_ids[0])
        except Exception as e:  # noqa: BLE001  no error of a receiver may fail a step
            self._log_push_error(f"{type(e).__name__}: {first_line(e)}")
            return
        self._pushed = rates.last
        self._push = threading.Thread(target=self._send, args=(send, values), name="progress push", daemon=True)
        self._push.start()

    def _receiver(self, replica_id: str) -> Send:
        """Return the function that sends values to the receiver. `replica_id` becomes part of the JSON for a URL.

        The active run of W&B or MLflow is looked up here, because MLflow's is not known on the thread that sends.
        """
        if not isinstance(self._to, str):
            return self._to
        library: Any = sys.modules.get(self._to)
        if self._to == "wandb":
            if library is None or (run := library.run) is None:
                raise RuntimeError("this process has no active run; call wandb.init()")
            # Without `commit=False`, the row that the script is filling would end.
            return lambda values: run.log(_prefixed(values), commit=False)
        if self._to == "mlflow":
            if library is None or (run := library.active_run()) is None:
                raise RuntimeError("this thread has no active run; call mlflow.start_run()")
            return lambda values: library.log_metrics(_prefixed(values), values["step"], run_id=run.info.run_id)
        return partial(_post, self._to, replica_id)

    def _send(self, send: Send, values: Values) -> None:
        try:
            send(values)
            self._log_push_error("")
        except Exception as e:  # noqa: BLE001  logged
            self._log_push_error(f"{type(e).__name__}: {first_line(e)}")

    def _log_push_error(self, error: str) -> None:
        """Log the error from a push, unless the previous push failed with the same error. Pass "" after a success."""
        before, self._error = self._error, error
        if error and error != before:
            log.warning("progress was not pushed to %s: %s; training is not affected", self._shown, error)


def _post(url: str, replica_id: str, values: Values) -> None:
    if error := asyncio.run(post_json(url, {"replica_id": replica_id, **values})):
        raise ConnectionError(error)


def _prefixed(values: Values) -> Values:
    return {f"lighthouse/{name}": value for name, value in values.items()}
