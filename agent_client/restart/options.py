"""The options of a Wrapper."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from agent_client.errors import ConfigurationError
from agent_client.restart.launch import Launch
from agent_client.restart.rules.config import RankConfig
from agent_client.restart.state import State
from lighthouse_protocol.limits import MAX_RESTARTS
from lighthouse_protocol.messages.run import RunTerms

Hook = Callable[[State], object]
Duration = timedelta | float
"""A plain number counts seconds."""

_STORE_NAMES = frozenset(
    {"host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"}
    | {"master_listen_fd", "use_libuv"}
)
_DURATIONS = (
    "barrier_timeout",
    "return_timeout",
    "lighthouse_timeout",
    "hard_timeout",
    "soft_timeout",
    "restart_window",
    "restart_delay",
)
_LEAST = {"active_world_size": 1, "min_active": 1, "divisible_by": 1, "max_iterations": 1, "max_restarts": 0}
RestartScope = Literal["run", "group"]
_FOR_RUNS = ("restart_scope", "active_world_size", "min_active", "divisible_by", "hosts_together")


def seconds(value: Duration, name: str) -> float:
    """Raises ConfigurationError for what is no positive length of time."""
    number = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 < number < float("inf"):
        raise ConfigurationError(f"{name}={value!r} is not a positive duration")
    return number


@dataclass(frozen=True, kw_only=True)
class Options:
    use_global_iteration: bool = False
    """Generations of the lighthouse: the whole run restarts together. False: this process alone, a local counter."""
    restart_scope: RestartScope = "run"
    """Which ranks restart together: those of the whole run, or those of the replica group, which then has generations,
    keys and budgets of its own: for a function that trains with an Agent, since its peers go on without it."""
    store_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """As TCPStore takes them: a store for the script, on MASTER_ADDR and MASTER_PORT + 2 unless they say otherwise.
    The process of slot 0 serves it where no supervisor does. Numbers and keys are in the lighthouse; reading them
    takes `timeout` at most."""
    barrier_timeout: Duration = 60.0
    """How long ranks that are alive and not ready are waited for."""
    return_timeout: Duration = 60.0
    """How long too few ranks wait for more, before the run is stopped."""
    lighthouse_timeout: Duration = 600.0
    """How long a rank that waits does without a lighthouse."""
    soft_timeout: Duration | None = 600.0
    """A function that has pinged in this generation and does not again for so long has failed. None: never."""
    hard_timeout: Duration = 90.0
    """A function that is interrupted and does not end in so long ends with its process; what is done between two
    generations has as long."""
    active_world_size: int | None = None
    """So many ranks train, the others are spares. Default: the supervisor's, else all."""
    min_active: int | None = None
    """With fewer the run waits, then stops. Default: the supervisor's, else 1."""
    divisible_by: int = 1
    """The number of active ranks is a multiple of it."""
    hosts_together: bool = False
    """The ranks of a host leave together."""
    max_iterations: int | None = None
    """So many generations, then the run is stopped, with exit code 130."""
    max_restarts: int | None = 10
    """So many restarts after failures of the function within `restart_window`; one failure more stops the run, with
    exit code 130. None: any number."""
    restart_window: Duration = 600.0
    restart_delay: Duration | None = 0.5
    """How long the next generation waits after one that got nowhere (no ping, and over within 10 s). It doubles each
    time in a row, up to 30 s. There is no delay after one that got somewhere, and none at all with None."""
    initialize: Hook | None = None
    """Called before each generation."""
    abort: Hook | None = None
    """Called on a thread of its own when the function is interrupted, to end what it waits for in C code. Process
    groups are ended without it."""
    finalize: Hook | None = None
    """Called after each generation that did not end well, before the next."""
    health_check: Hook | None = None
    """Called after `finalize`; if it raises, so does the wrapped function, and the process ends."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ConfigurationError for a name that there is not, too."""
        known = [each.name for each in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigurationError(f"Wrapper has no option {unknown[0]!r}; it has {', '.join(known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.store_kwargs) - _STORE_NAMES)
        if unknown:
            raise ConfigurationError(f"store_kwargs: TCPStore has no {unknown[0]!r}; it has {sorted(_STORE_NAMES)}")
        if self.restart_scope not in get_args(RestartScope):
            raise ConfigurationError(
                f"restart_scope={self.restart_scope!r} is not one of {', '.join(get_args(RestartScope))}"
            )
        if not self.use_global_iteration:
            defaults = Options(use_global_iteration=True)
            given = [name for name in _FOR_RUNS if getattr(self, name) != getattr(defaults, name)]
            if given:
                raise ConfigurationError(
                    f"{given[0]} needs use_global_iteration=True: without it each process restarts alone"
                )
        for name in _DURATIONS:
            if getattr(self, name) is not None:
                seconds(getattr(self, name), name)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)} is not at least {least}")
        if self.max_restarts is not None and self.max_restarts > MAX_RESTARTS:
            raise ConfigurationError(
                f"max_restarts={self.max_restarts} is more than {MAX_RESTARTS}; None is any number"
            )

    def launch(self) -> Launch:
        """This process's place among those that restart together. Raises ConfigurationError."""
        launch = Launch.read()
        return launch.of_group() if self.restart_scope == "group" else launch

    @property
    def store_timeout_s(self) -> float:
        return seconds(self.store_kwargs.get("timeout", 5.0), "store_kwargs['timeout']")

    def terms(self, launch: Launch) -> RunTerms:
        """What all ranks of the run agree on."""
        active = self.active_world_size if self.active_world_size is not None else launch.active
        min_active = self.min_active if self.min_active is not None else launch.min_active
        return RunTerms(
            world_size=launch.slots,
            active=active,
            min_active=min_active or 1,
            divisible_by=self.divisible_by,
            hosts_together=self.hosts_together,
            stride=launch.stride,
            join_timeout_s=seconds(self.barrier_timeout, "barrier_timeout"),
            return_timeout_s=seconds(self.return_timeout, "return_timeout"),
            max_iterations=self.max_iterations,
            max_restarts=self.max_restarts,
            restart_window_s=seconds(self.restart_window, "restart_window"),
            restart_delay_s=None if self.restart_delay is None else seconds(self.restart_delay, "restart_delay"),
        )

    def rank_config(self) -> RankConfig:
        return RankConfig(
            lighthouse_timeout_s=seconds(self.lighthouse_timeout, "lighthouse_timeout"),
            hard_timeout_s=seconds(self.hard_timeout, "hard_timeout"),
            soft_timeout_s=None if self.soft_timeout is None else seconds(self.soft_timeout, "soft_timeout"),
        )
