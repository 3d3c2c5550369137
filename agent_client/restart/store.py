"""State of a wrapped function in its run, and StoreMixin, which reads and writes keys of the run.

StoreMixin has the methods that scripts written for other libraries use to read and record iterations. It has no store
of its own: the lighthouse numbers the generations, stores their keys, and refuses writes from an outdated generation.
Mix it into a store class, or use it directly, inside a wrapped function with `use_global_iteration=True`.

There are no methods for elections, readiness keys and heartbeats, because the lighthouse does this work. Their names
raise an AttributeError that names the replacement (docs/reference/restart-names.md).
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agent_client.errors import ConfigurationError
from lighthouse_protocol.messages.run import KeyKind, RunCounters
from lighthouse_protocol.refusals import UnknownName
from lighthouse_runtime.client.clients import LighthouseClient

T = TypeVar("T")

FIRST_PAUSE_S = 0.01
MAX_PAUSE_S = 0.5


class PresentRun(Protocol):
    """A run in which this process takes part, as seen by StoreMixin. Implemented by RankThread (rank_thread.py)."""

    client: LighthouseClient
    run_id: str
    state: "State"
    slot: int
    secret: str
    timeout_s: float

    def advance(self) -> int: ...


_LIGHTHOUSE_COORDINATES = "no rank coordinates, the lighthouse does: state.advance() needs no coordinator"
_HEARTBEATS = "ranks write no heartbeats; `lighthouse ranks` shows the age of each rank's last sign of life"
_READY = "the wrapper reports that a rank is ready; state.advance() does both, and waits for the next iteration"
_KEYS = "use set_key(kind, name, value) and get_key(kind, name), or a TCPStore of your own (store_kwargs)"
_INSTEAD = {
    "elect_coordinator": _LIGHTHOUSE_COORDINATES,
    "get_current_coordinator": _LIGHTHOUSE_COORDINATES,
    "is_coordinator_alive": _LIGHTHOUSE_COORDINATES,
    "update_coordinator_heartbeat": _HEARTBEATS,
    "get_coordinator_heartbeat": _HEARTBEATS,
    "get_heartbeat": _HEARTBEATS,
    "COORDINATOR_ELECTION": _LIGHTHOUSE_COORDINATES,
    "COORDINATOR_HEARTBEAT": _HEARTBEATS,
    "increment_global_iteration": "only the lighthouse assigns numbers: call state.advance()",
    "wait_for_global_iteration_ready": _READY,
    "signal_global_iteration_ready": _READY,
    "signal_readiness": _READY,
    "wait_for_new_iteration": _READY,
    "catch_up_restarting_rank": "handle_rank_restart() returns the iteration that contains this rank",
    "GLOBAL_ITERATION_COUNTER": "no key holds the number: get_global_iteration() asks the lighthouse",
    "GLOBAL_ITERATION_READY": _READY,
    "GLOBAL_ITERATION_BARRIER": _READY,
    "get_packed": _KEYS,
    "get": _KEYS,
    "set": _KEYS,
    "add": _KEYS,
}

present_runs: list[PresentRun] = []
"""Runs that this process takes part in. If wrapped functions are nested, the run of the innermost is last."""


class StoreMixin:
    """Reads and writes iterations and keys of a run, in wrapped functions with `use_global_iteration=True`.

    Use it as `call_wrapper.store`, or mix it into a store class. The lighthouse stores the values. A `rank` is always
    an initial rank (slot). Every method raises a LighthouseError if the lighthouse refuses or does not answer in time.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For a method of another library's store, the message names the replacement."""
            if (inherited := getattr(super(), "__getattr__", None)) is not None:
                return inherited(name)
            instead = _INSTEAD.get(name)
            why = f"; {instead} (docs/reference/restart-names.md)" if instead else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}")

    def get_global_iteration(self) -> int:
        """Return the number of this process's current generation."""
        return _run().state.iteration

    def coordinate_global_iteration_advance(
        self, world_size: int | None = None, timeout: timedelta | None = None, is_coordinator: bool = False
    ) -> int:
        """Request the next generation, wait for all active ranks, and return its number. The arguments are ignored."""
        return _run().advance()

    def handle_rank_restart(self, world_size: int | None = None, timeout: timedelta | None = None) -> int:
        """Record that this rank is in the current generation, and return its number. The arguments are ignored."""
        run = _run()
        self.record_iteration_for_rank(run.slot, run.state.iteration)
        return run.state.iteration

    def record_iteration_for_rank(self, rank: int, iteration: int) -> None:
        """Store an iteration number for a rank, under a key of the current generation."""
        self.set_key(KeyKind.ITERATION, _last(rank), str(iteration))

    def get_iteration_for_rank(self, rank: int) -> int:
        """Return the iteration that was recorded for a rank in the current generation.

        If none was recorded, return the last generation in which the rank's process was active. If there is none,
        return the current generation.
        """
        run = _run()
        try:
            return int(self.get_key(KeyKind.ITERATION, _last(rank)))
        except UnknownName:
            seen = last_generation(run.client, run.run_id, rank, run.timeout_s)
        return run.state.iteration if seen is None else seen

    def get_active_ranks_for_coordination(
        self, world_size: int | None = None, timeout: timedelta | None = None
    ) -> set[int]:
        """Return the ranks that the lighthouse reports as alive and not spares. The arguments are ignored."""
        run = _run()
        found = [status for status in run.client.runs(run.run_id, timeout_s=run.timeout_s) if status.run == run.run_id]
        return {rank.slot for status in found for rank in status.ranks if rank.state in ("active", "ready", "finished")}

    def set_key(self, kind: KeyKind, name: str, value: str) -> None:
        """Set a key in the current generation.

        Args:
            kind: Kind of the key. Keys of different kinds may have the same name.
            name: Name of the key.
            value: The value.

        Raises:
            WrongState: This generation has ended, and another one has formed.
        """
        run = _run()
        run.client.put_key(
            run.state.iteration, kind, name, value.encode(), slot=run.slot, secret=run.secret, timeout_s=run.timeout_s
        )

    def get_key(self, kind: KeyKind, name: str, generation: int | None = None) -> str:
        """Return the value of a key.

        Args:
            kind: Kind of the key.
            name: Name of the key.
            generation: An earlier generation, or None for the current one. Only the last few generations are stored.

        Raises:
            UnknownName: The key was not set in that generation.
            WrongState: The current generation has ended, and another one has formed.
        """
        run = _run()
        _, keys = run.client.get_keys(run.state.iteration, kind, name, of=generation, timeout_s=run.timeout_s)
        if (kind, name) not in keys:
            number = run.state.iteration if generation is None else generation
            raise UnknownName(f"key: {kind}_{number}_{name} was not set")
        return keys[kind, name].decode()

    @property
    def previous(self) -> Mapping[tuple[str, str], str]:
        """Values by (kind, name), each from the last earlier generation in which the key was set.

        Every access sends a request to the lighthouse. Raise WrongState if another generation has formed.
        """
        run = _run()
        _, keys = run.client.get_keys(run.state.iteration, previous=True, timeout_s=run.timeout_s)
        return {(str(kind), name): value.decode() for (kind, name), value in keys.items()}


def until_set(read: Callable[[], T], limit_s: float, gives_up: Callable[[], bool] = lambda: False) -> T | None:
    """Call `read` repeatedly until it no longer raises UnknownName.

    Args:
        read: Reads the key.
        limit_s: Time limit in seconds.
        gives_up: Called before each attempt. If it returns True, stop.

    Returns:
        The result of `read`, or None if `gives_up` returned True.

    Raises:
        TimeoutError: The key was not set in time.
    """
    ends_at, pause_s = time.monotonic() + limit_s, FIRST_PAUSE_S
    while not gives_up():
        try:
            return read()
        except UnknownName:
            if time.monotonic() >= ends_at:
                raise TimeoutError(f"it was not set within {limit_s:g} s") from None
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
    return None


def last_generation(client: LighthouseClient, run: str, slot: int, timeout_s: float) -> int | None:
    """Return the last generation in which the slot's newest process was active, or None if it never was."""
    for status in client.runs(run, timeout_s=timeout_s):
        for rank in status.ranks:
            if status.run == run and rank.slot == slot:
                return rank.generation
    return None


def _last(rank: int) -> str:
    return f"rank_{rank}_last_iteration"


def _run() -> PresentRun:
    if not present_runs:
        raise ConfigurationError("no wrapped function with use_global_iteration=True is running in this process")
    return present_runs[-1]


class RestartAbort(SystemExit):
    """Raised by a wrapped function to stop the run on all ranks, without a restart.

    The wrapper then raises this exception on every rank, and also if the run is stopped for another reason, such as too
    many restarts. A script that does not catch the exception exits with code 130.
    """

    def __init__(self, reason: str = "RestartAbort") -> None:
        """Create the exception.

        Args:
            reason: Reason that is logged and sent to the other ranks.
        """
        super().__init__(130)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclasses.dataclass
class State:
    """Position of this process in its run, and the run's counters. The hooks of a Wrapper receive the State."""

    rank: int = 0
    """Rank among the active ranks."""
    world_size: int = 1
    """Number of active ranks."""
    iteration: int = 0
    """Number of the generation. Without `use_global_iteration`, the number of this process's attempt."""
    global_iteration_counter: int = 0
    """Number of the last generation that began with a restarted process."""
    job_restart_counter: int = 0
    """Number of incidents in the run. An incident is a failure after which the ranks restart."""
    ranks_restart_counter: int = 0
    """Number of incidents, since a process last restarted, in which all ranks restarted in process."""
    initial_rank: int = 0
    """Slot of the process. It stays the same as long as the process lives."""
    use_global_iteration: bool = False
    """True if all ranks in the run restart together."""
    store: StoreMixin | None = dataclasses.field(default=None, repr=False, compare=False)

    def begin_generation(self, counters: RunCounters, rank: int, world_size: int) -> None:
        """Set this process's position in a new generation, and the environment variables RANK and WORLD_SIZE."""
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
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
        """Request the next iteration, and wait until all active ranks have requested it.

        Without `use_global_iteration`, only increment the iteration of this process. The arguments exist for
        compatibility: `store` is used only if this State has no store, and the others are ignored, because the
        lighthouse coordinates the ranks.

        Returns:
            The number of the next iteration.
        """
        if not self.use_global_iteration:
            self.iteration += 1
        else:
            self.iteration = self._coordination(store).coordinate_global_iteration_advance(
                world_size, timeout, is_coordinator
            )
        return self.iteration

    def sync_with_global_iteration(self, store: StoreMixin | None = None, timeout: timedelta | None = None) -> int:
        """Return the current iteration. With `use_global_iteration`, also record it for this rank.

        `store` is used only if this State has no store, and `timeout` is ignored.
        """
        if self.use_global_iteration:
            self.iteration = self._coordination(store).handle_rank_restart(self.world_size, timeout)
        return self.iteration

    def _coordination(self, store: StoreMixin | None) -> StoreMixin:
        found = self.store if self.store is not None else store
        if found is None:
            raise ConfigurationError("this State belongs to no wrapped function and has no store, so it has no number")
        return found
