"""What a wrapped function knows of its generation, and the counters of its run."""

import dataclasses
from datetime import timedelta

from agent_client.errors import ConfigurationError
from agent_client.restart.store import StoreMixin
from lighthouse_protocol.messages.run import RunCounters


class RestartAbort(SystemExit):
    """Ends the run for all, without a restart: raise it, or be given it when the run was stopped. Exit code 130."""

    def __init__(self, reason: str = "RestartAbort") -> None:
        super().__init__(130)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclasses.dataclass
class State:
    """`rank` of `world_size` active ranks. `iteration`: the generation, or, without use_global_iteration, a local
    counter. `global_iteration_counter`: the last number that a restarted process began. `initial_rank`: the slot."""

    rank: int = 0
    world_size: int = 1
    iteration: int = 0
    global_iteration_counter: int = 0
    job_restart_counter: int = 0
    ranks_restart_counter: int = 0
    initial_rank: int = 0
    use_global_iteration: bool = False
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
        """Ask for the next iteration and wait for it; all active ranks advance together, when all have asked.

        The lighthouse knows the world, its timeouts, and coordinates: the arguments are accepted, and change nothing.
        """
        if not self.use_global_iteration:
            self.iteration += 1
        else:
            self.iteration = self._coordination(store).coordinate_global_iteration_advance(
                world_size, timeout, is_coordinator
            )
        return self.iteration

    def sync_with_global_iteration(self, store: StoreMixin | None = None, timeout: timedelta | None = None) -> int:
        """The present iteration: a restarted process has been told it before its function runs."""
        if self.use_global_iteration:
            self.iteration = self._coordination(store).handle_rank_restart(self.world_size, timeout)
        return self.iteration

    def _coordination(self, store: StoreMixin | None) -> StoreMixin:
        found = self.store if self.store is not None else store
        if found is None:
            raise ConfigurationError("this State belongs to no wrapped function and has no store, so it has no number")
        return found
