"""Options of a Wrapper, and the position of this process in its run.

`Options` validates the options that a script passes to the decorator. `Launch` reads the environment variables with
which a supervisor or torchrun identifies this process and its lighthouse.
"""

import dataclasses
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath
from typing import Any, Literal, get_args

from agent_client.errors import ConfigurationError
from agent_client.restart.rules.events import RankConfig
from agent_client.restart.store import State
from agent_client.step.environment import Variables
from lighthouse_protocol.coordinator import parse_coordinator
from lighthouse_protocol.identity import group_run
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, DEFAULT_STRIDE, MAX_RESTARTS, SECRET_BYTES
from lighthouse_protocol.messages.run import RankHello, RankId, RunTerms

NO_NAME = "none"
"""torchrun's default run id, which all jobs without --rdzv-id share."""


@dataclass(frozen=True, slots=True)
class Launch:
    lighthouse: str
    """One or more addresses, or a join string (address and token). Empty if there is no lighthouse."""
    job: str
    run: str
    slot: int
    """Number, from 0, that identifies this rank in the run across restarts. Without a supervisor, it is RANK."""
    slots: int
    """Number of slots in the run. Without a supervisor, it is WORLD_SIZE."""
    incarnation: str
    attempt: int
    """How many times this slot was started before."""
    stride: int
    active: int | None
    """Number of ranks that train, if the supervisor sets it."""
    min_active: int | None
    """Minimum number of ranks that train, if the supervisor sets it."""
    is_supervised: bool
    store_port: int | None
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES), repr=False)

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Launch":
        reader = Variables(variables)
        supervised, slot = reader.text("LIGHTHOUSE_INCARNATION"), reader.read_number("LIGHTHOUSE_SLOT", "RANK") or 0
        offset, restarts = (
            reader.read_number("LIGHTHOUSE_SLOT_OFFSET"),
            reader.read_number("TORCHELASTIC_RESTART_COUNT"),
        )
        incarnation, stride = supervised or uuid.uuid4().hex, 1
        if offset is not None:  # torchrun under a supervisor
            incarnation, slot = f"{supervised}.{os.getpid()}", offset + (reader.read_number("RANK") or 0)
        elif not supervised and restarts is not None:  # torchrun restarts its ranks together
            incarnation, stride = f"{incarnation}.torchrun-{restarts}", DEFAULT_STRIDE
        return cls(
            lighthouse=reader.text("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"),
            job=reader.text("LIGHTHOUSE_JOB") or DEFAULT_JOB,
            run=run_of(variables),
            slot=slot,
            slots=reader.read_number("LIGHTHOUSE_WORLD_SIZE", "WORLD_SIZE", least=1) or 1,
            incarnation=incarnation,
            attempt=reader.read_number("LIGHTHOUSE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT") or 0,
            stride=reader.read_number("LIGHTHOUSE_STRIDE", least=1) or stride,
            active=reader.read_number("LIGHTHOUSE_ACTIVE_RANKS", least=1),
            min_active=reader.read_number("LIGHTHOUSE_MIN_ACTIVE_RANKS", least=1),
            is_supervised=bool(supervised),
            store_port=reader.read_number("LIGHTHOUSE_STORE_PORT"),
            secret=reader.text("LIGHTHOUSE_RUN_SECRET") or secrets.token_hex(SECRET_BYTES),
        )

    @property
    def lighthouse_address(self) -> str:
        """First address in `lighthouse`, without a token, or an empty string if there is no lighthouse."""
        if not self.lighthouse:
            return ""
        return str(parse_coordinator(self.lighthouse, "LIGHTHOUSE_ADDRESS").addresses[0])

    def of_group(self, variables: Mapping[str, str] = os.environ) -> "Launch":
        reader = Variables(variables)
        replica_id = reader.text("LIGHTHOUSE_MANAGER_REPLICA_ID", "REPLICA_GROUP_ID")
        if not replica_id:
            raise ConfigurationError('REPLICA_GROUP_ID is not set; restart_scope="group" needs a replica group')
        slot = reader.read_number("LIGHTHOUSE_GROUP_RANK", "RANK") or 0
        slots = reader.read_number("LIGHTHOUSE_GROUP_WORLD_SIZE", "WORLD_SIZE", least=1) or 1
        return dataclasses.replace(self, run=group_run(self.run, replica_id), slot=slot, slots=slots)

    def entry(self, terms: RunTerms) -> RankHello:
        rank = RankId(self.slot, self.incarnation)
        return RankHello(rank, terms, self.attempt, host=socket.gethostname(), pid=os.getpid(), secret=self.secret)


def run_of(variables: Mapping[str, str]) -> str:
    """Return the run id from environment variables. For a torchrun job without --rdzv-id, derive a unique id."""
    reader = Variables(variables)
    run = reader.text("LIGHTHOUSE_RUN_ID", "TORCHELASTIC_RUN_ID") or DEFAULT_RUN
    if run != NO_NAME or reader.text("LIGHTHOUSE_RUN_ID"):
        return run
    error_file = PurePath(reader.text("TORCHELASTIC_ERROR_FILE"))
    if (
        reader.read_number("GROUP_WORLD_SIZE") == 1 and len(error_file.parents) > 3
    ):  # FOLDER/none_UNIQUE/attempt_0/0/error.json
        return f"torchrun-{socket.gethostname()}-{error_file.parents[2].name.removeprefix('none_')}"
    return f"torchrun-{reader.text('MASTER_ADDR')}-{reader.text('MASTER_PORT')}"


Hook = Callable[[State], object]
Duration = timedelta | float
"""Duration as a timedelta, or as a number of seconds."""

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
    number = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not 0 < number < float("inf"):
        raise ConfigurationError(f"{name}={value!r} is not a positive duration")
    return number


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `Wrapper`. Times are seconds or `datetime.timedelta`."""

    use_global_iteration: bool = False
    """If True, all ranks in the run restart together, in generations that the lighthouse numbers. If False, this
    process restarts alone and counts its own iterations."""
    restart_scope: RestartScope = "run"
    """Ranks that restart together: all ranks in the run (`run`), or the ranks in this replica group (`group`), which
    then has its own generations, keys and budgets. Choose `group` for a function that trains with an Agent: the other
    groups keep training without this one."""
    store_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of a torch TCPStore to serve for the script. The default address is MASTER_ADDR and MASTER_PORT + 2.
    The process of slot 0 serves the store unless a supervisor does. `timeout` also limits reads of numbers and keys
    from the lighthouse."""
    barrier_timeout: Duration = 60.0
    """How long a new generation waits for ranks that are alive but not ready."""
    return_timeout: Duration = 60.0
    """How long a run with too few ranks waits for more ranks before it stops."""
    lighthouse_timeout: Duration = 600.0
    """How long a waiting rank tolerates an unreachable lighthouse."""
    soft_timeout: Duration | None = 600.0
    """Maximum time between two calls of `ping`. If it is exceeded, the function counts as failed. The limit applies
    after the first `ping` of a generation. None disables the limit."""
    hard_timeout: Duration = 90.0
    """How long an interrupted function may continue to run before its process is killed. The hooks between two
    generations have the same limit."""
    active_world_size: int | None = None
    """Number of ranks that train. The others are spares. Default: the supervisor's `--active-ranks`, or else all."""
    min_active: int | None = None
    """With fewer active ranks than this, the run waits for `return_timeout`, and then stops. Default: the supervisor's
    `--min-active-ranks`, or else 1."""
    divisible_by: int = 1
    """The number of active ranks is always a multiple of this number."""
    hosts_together: bool = False
    """If True, all ranks on a host become spares if one of them is missing."""
    max_iterations: int | None = None
    """Maximum number of generations. The run then stops with exit code 130. None disables the limit."""
    max_restarts: int | None = 10
    """Maximum number of restarts after failures of the function within `restart_window`. One more failure stops the
    run with exit code 130. None disables the limit."""
    restart_window: Duration = 600.0
    """Length of the sliding time window in which restarts are counted."""
    restart_delay: Duration | None = 0.5
    """Delay before the next generation if the last one made no progress, that is, ended within 10 s and without a ping.
    The delay doubles with each consecutive generation of this kind, up to 30 s. None disables the delay."""
    initialize: Hook | None = None
    """Called before each generation, with the State."""
    abort: Hook | None = None
    """Called in a separate thread when the function is interrupted, to abort calls that are blocked in C code. The
    wrapper itself aborts torch's process groups."""
    finalize: Hook | None = None
    """Called after each failed generation, before the next one."""
    health_check: Hook | None = None
    """Called after `finalize`. If it raises, the decorated function raises the same error, and this process leaves the
    run."""

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> "Options":
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
        launch = Launch.read()
        return launch.of_group() if self.restart_scope == "group" else launch

    @property
    def store_timeout_s(self) -> float:
        return seconds(self.store_kwargs.get("timeout", 5.0), "store_kwargs['timeout']")

    def terms(self, launch: Launch) -> RunTerms:
        """Return the settings that must be the same on all ranks in the run.

        If `active_world_size` or `min_active` is None, use the value that the supervisor has set in `launch`.
        """
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
