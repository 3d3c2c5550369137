"""State of a wrapped function's generation, and the counters of its run."""

import dataclasses
from datetime import timedelta

from agent_client.errors import ConfigurationError
from agent_client.restart.store import StoreMixin
from lighthouse_protocol.messages.run import RunCounters


class RestartAbort(SystemExit):
    """Stops the run for all ranks, without a restart.

    A wrapped function raises it to stop the run. The wrapper raises it at every rank when the run is stopped. A script
    that does not catch it ends with exit code 130.
    """

    def __init__(self, reason: str = "RestartAbort") -> None:
        """Set the reason.

        Args:
            reason: Text for logs, and for the other ranks.
        """
        super().__init__(130)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclasses.dataclass
class State:
    """Position of this process in its run, and the run's counters. Hooks of a Wrapper receive it."""

    rank: int = 0
    """Rank among the active ranks."""
    world_size: int = 1
    """Number of active ranks."""
    iteration: int = 0
    """Number of the generation. Without `use_global_iteration`, a counter of this process."""
    global_iteration_counter: int = 0
    """Number of the last generation that a restarted process began."""
    job_restart_counter: int = 0
    """Number of incidents of the run."""
    ranks_restart_counter: int = 0
    """Number of incidents since the last restart of a process that the ranks recovered from in their processes."""
    initial_rank: int = 0
    """Slot of the process, which stays the same for its whole life."""
    use_global_iteration: bool = False
    """Whether all ranks of the run restart together."""
    store: StoreMixin | None = dataclasses.field(default=None, repr=False, compare=False)

    def take(self, counters: RunCounters, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.iteration = counters.number
        self.global_iteration_counter = counters.global_iteration
        self.job_restart_counter = counters.job_restarts
        self.ranks_restart_counter = counters.ranks_restarts

    def advance(
        self,
        store: StoreMixin | None = None,
        world_size: int | None = None,
        timeout: timedelta | None = None,
        is_coordinator: bool = False,
    ) -> int:
        """Request the next iteration and wait for it. All active ranks advance together once all have asked.

        The arguments are accepted for compatibility and ignored: the lighthouse coordinates.

        Returns:
            The number of the iteration.
        """
        if not self.use_global_iteration:
            self.iteration += 1
        else:
            self.iteration = self._coordination(store).coordinate_global_iteration_advance(
                world_size, timeout, is_coordinator
            )
        return self.iteration

    def sync_with_global_iteration(self, store: StoreMixin | None = None, timeout: timedelta | None = None) -> int:
        """Return the present iteration. A restarted process has received it before its function runs."""
        if self.use_global_iteration:
            self.iteration = self._coordination(store).handle_rank_restart(self.world_size, timeout)
        return self.iteration

    def _coordination(self, store: StoreMixin | None) -> StoreMixin:
        found = self.store if self.store is not None else store
        if found is None:
            raise ConfigurationError("this State belongs to no wrapped function and has no store, so it has no number")
        return found
