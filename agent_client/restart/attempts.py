"""Where a wrapped function's attempts get their numbers: the lighthouse (rank_thread.py), or this process alone."""

from typing import Protocol, Self

from agent_client.restart.rules.events import Ended, Run
from lighthouse_protocol.messages.run import RunCompleted, RunCounters, RunStopped


class Attempts(Protocol):
    """`ready` or `returned`, then `wait`; after Run: `raised` or `returned`; after Ended: nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def ready(self) -> None: ...
    def wait(self) -> Run | Ended: ...
    def raised(self, reason: str) -> None: ...
    def returned(self) -> None: ...
    def stepped(self, step: int) -> None: ...
    def is_over(self, number: int) -> bool: ...


class LocalAttempts:
    """No lighthouse: this process's own faults, counted from 0. Other processes' faults do not interrupt it."""

    def __init__(self, rank: int, world_size: int, max_iterations: int | None) -> None:
        self._place = rank, world_size
        self._max_iterations = max_iterations
        self._counters = RunCounters()
        self._has_returned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> None:
        pass

    def wait(self) -> Run | Ended:
        if self._has_returned:
            return Ended(RunCompleted(self._counters.number))
        number = self._counters.number + 1
        if self._max_iterations is not None and number >= self._max_iterations:
            return Ended(RunStopped(f"max_iterations: {self._max_iterations} iterations were run", "", number - 1))
        self._counters = RunCounters(number, job_restarts=number, ranks_restarts=number)
        return Run(self._counters, *self._place)

    def raised(self, reason: str) -> None:
        pass

    def returned(self) -> None:
        self._has_returned = True

    def stepped(self, step: int) -> None:
        pass

    def is_over(self, number: int) -> bool:
        return False
