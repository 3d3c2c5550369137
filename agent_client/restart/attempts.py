"""Where a wrapped function's attempts get their numbers: the lighthouse (rank_thread.py), or this process alone."""

import time
from typing import Protocol, Self

from agent_client.restart.rules.events import Ended, Run
from lighthouse_protocol.messages.run import RunCompleted, RunCounters, RunStopped, RunTerms
from lighthouse_protocol.rules.restart_budget import RestartBudget


class Attempts(Protocol):
    """`ready` or `returned`, then `wait`; after Run: `raised` or `returned`; after Ended: nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def ready(self) -> None: ...
    def wait(self) -> Run | Ended: ...
    def raised(self, reason: str) -> None: ...
    def returned(self) -> None: ...
    def stepped(self, step: int | None) -> None: ...
    def is_over(self, number: int) -> bool: ...


class LocalAttempts:
    """No lighthouse: this process's own faults, counted from 0. Other processes' faults do not interrupt it."""

    def __init__(self, rank: int, world_size: int, terms: RunTerms) -> None:
        self._place = rank, world_size
        self._terms = terms
        self._counters = RunCounters()
        self._has_returned = False
        self._budget = RestartBudget()
        self._last_failure = ""
        self._began_at = 0.0
        self._has_stepped = False
        self._delay_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> None:
        pass

    def wait(self) -> Run | Ended:
        if self._has_returned:
            return Ended(RunCompleted(self._counters.number))
        number, limit = self._counters.number + 1, self._terms.max_iterations
        if limit is not None and number >= limit:
            return Ended(RunStopped(f"max_iterations: {limit} iterations were run", "", number - 1))
        if why := self._budget.why_exhausted(self._terms):
            return Ended(RunStopped(f"{why}; the last: {self._last_failure}", "", number - 1))
        time.sleep(self._delay_s)
        self._began_at, self._has_stepped = time.monotonic(), False
        self._counters = RunCounters(number, job_restarts=number, ranks_restarts=number)
        return Run(self._counters, *self._place)

    def raised(self, reason: str) -> None:
        now = time.monotonic()
        lasted_s = now - self._began_at
        self._delay_s = self._budget.fail(self._terms, now, lasted_s=lasted_s, has_stepped=self._has_stepped)
        self._last_failure = reason

    def returned(self) -> None:
        self._has_returned = True

    def stepped(self, step: int | None) -> None:
        self._has_stepped = True

    def is_over(self, number: int) -> bool:
        return False
