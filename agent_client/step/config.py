"""Options of an Agent. The table in docs/reference/options.md is generated from the dataclass `AgentConfig`.

`AgentOptions` repeats the fields as keyword arguments, for type checkers and editors. A test compares the two classes.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from agent_client.collectives.peers import PROCESS_GROUPS, ProcessGroupName
from agent_client.errors import ConfigurationError
from agent_client.step.rules.world_size import WorldSize, WorldSizeMode
from lighthouse_protocol.limits import QUORUM_TIMEOUT_S

HealModeName = Literal["blocking", "catch_up"]
ReduceDtypeName = Literal["tensor", "float32"]
WorldSizeModeName = Literal["dynamic", "fixed_with_spares", "constant_batch"]
OnNonfiniteName = Literal["commit", "discard", "raise"]

MAX_TIMEOUT_S = 1e9
"""Maximum time limit in seconds. Longer waits overflow Python's clocks, and a manager refuses such votes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Options of an Agent. `Agent.from_env` takes each field as a keyword argument.

    Raises:
        ConfigurationError: A field has an invalid value. The message names the field.

    Example:
        ```python
        agent = Agent.from_env(state=TrainState(model, sgd), timeout_s=120.0, heal_mode="catch_up")
        ```
    """

    timeout_s: float = 60.0
    """Time limit for each collective and each vote in seconds. In a step in which a peer heals, `heal_timeout_s` is
    added."""
    connect_timeout_s: float = 10.0
    """Time limit in seconds of each stage of connecting to the peers of a new quorum: reaching their store, connecting,
    and with NCCL a first collective. A rank waits up to three times this limit for a missing peer."""
    quorum_timeout_s: float = QUORUM_TIMEOUT_S
    """Time limit of a quorum request in seconds. When it expires, the step is discarded and the request is repeated."""
    heal_timeout_s: float = 300.0
    """Time limit for copying the state of a peer, in seconds."""
    process_group: ProcessGroupName = "gloo"
    """Backend that connects a rank to the same rank in the other replica groups. `gloo` transfers tensors of any
    device through the CPU, `nccl` through the CUDA device. `isolated` and `isolated:nccl` run gloo or NCCL in a child
    process that can be killed. With `nccl`, create the Agent before any default process group that uses NCCL, or set
    `TORCH_NCCL_DUMP_ON_TIMEOUT=0`. Otherwise torch may abort the process minutes after a peer was lost."""
    heal_mode: HealModeName = "blocking"
    """How this group heals. With `blocking`, the other groups wait for this group in one step. With `catch_up`, this
    group heals in the background, and the other groups continue to train without waiting."""
    reduce_dtype: ReduceDtypeName = "tensor"
    """How float16 and bfloat16 gradients are averaged. `tensor` keeps their dtype and divides before the sum, as
    torch's DDP does. `float32` sums in float32 and rounds at the end, which transfers twice as many bytes. All groups
    must use the same value."""
    max_consecutive_discards: int = 30
    """Number of consecutive discarded steps after which the Agent raises AgentError. Steps that were discarded
    because of another group (it exited, failed to heal, or runs a different script) do not count, and neither do
    steps without a quorum. The same number of consecutive refused quorum requests also raises AgentError."""
    manager_restart_timeout_s: float = 10.0
    """Time in seconds that a rank waits for an exited manager to restart before the rank raises AgentError. A rank does
    not wait for a manager that it started itself."""
    world_size_mode: WorldSizeModeName | WorldSizeMode = "dynamic"
    """How the batches of a step depend on the number of groups. With `dynamic`, each contributing group has one
    batch. With `fixed_with_spares`, each of the first `world_size` groups has one batch. With `constant_batch`, a
    step always has `world_size` batches, distributed among the contributing groups."""
    world_size: int = 0
    """Number of batches in a step, at least 1. Not used with `dynamic`."""
    share_by_speed: bool = False
    """With `constant_batch`: give each group microbatches in proportion to its speed, instead of equally many. Every
    sample still counts the same. The loop must use `microbatches()` or `slots()`. Only for groups of one rank. All
    groups must use the same value."""
    check_state_every: int = 16
    """Interval in steps at which ranks compare a part of their parameters with their peers. 0 disables the comparison.
    If groups have different values, the largest applies. If any group has 0, no group compares."""
    on_nonfinite: OnNonfiniteName = "discard"
    """What to do with a step in which a gradient is infinite or NaN. `discard` repeats the step in all groups,
    `raise` also raises AgentError on the rank, and `commit` does not check. Steps that a GradScaler skips are not
    affected. If groups have different values, the strictest applies to all."""
    advertise: str | None = None
    """Address at which the peers can reach this host. Default: LIGHTHOUSE_MANAGER_ADVERTISE, or else an address of the
    interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, or else the address that routes to the manager."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "quorum_timeout_s", "heal_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                value = getattr(self, name)
                raise ConfigurationError(
                    f"{name}: {value} is not a positive number of seconds, at most {MAX_TIMEOUT_S:g}"
                )
        if not self.manager_restart_timeout_s >= 0:
            raise ConfigurationError(f"manager_restart_timeout_s: {self.manager_restart_timeout_s} s is negative")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.max_consecutive_discards < 1:
            raise ConfigurationError(f"max_consecutive_discards: {self.max_consecutive_discards} is not at least 1")
        if self.world_size_mode != WorldSizeMode.DYNAMIC and self.world_size < 1:
            raise ConfigurationError(f"world_size: {self.world_size}; {self.world_size_mode} needs at least 1")
        if self.share_by_speed and self.world_size_mode != WorldSizeMode.CONSTANT_BATCH:
            raise ConfigurationError(f"share_by_speed: not with {self.world_size_mode}; it needs constant_batch")
        if self.check_state_every < 0:
            raise ConfigurationError(f"check_state_every: {self.check_state_every} is negative; 0 compares nothing")

    @property
    def counting(self) -> WorldSize:
        return WorldSize(WorldSizeMode(self.world_size_mode), self.world_size)


_CHOICES = {
    "process_group": PROCESS_GROUPS,
    "heal_mode": get_args(HealModeName),
    "reduce_dtype": get_args(ReduceDtypeName),
    "world_size_mode": tuple(WorldSizeMode),
    "on_nonfinite": get_args(OnNonfiniteName),
}

DEFAULTS = AgentConfig()


def config_of(options: Mapping[str, Any]) -> AgentConfig:
    """Create an AgentConfig from keyword arguments.

    Raises:
        ConfigurationError: An option is unknown or has an invalid value. The message names the option.
    """
    known = [field.name for field in fields(AgentConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
            raise ConfigurationError(f"Agent.from_env has no option {name}; {advice}")
    return AgentConfig(**options)


class AgentOptions(TypedDict, total=False):
    timeout_s: float
    connect_timeout_s: float
    quorum_timeout_s: float
    heal_timeout_s: float
    process_group: ProcessGroupName
    heal_mode: HealModeName
    reduce_dtype: ReduceDtypeName
    max_consecutive_discards: int
    manager_restart_timeout_s: float
    world_size_mode: WorldSizeModeName | WorldSizeMode
    world_size: int
    share_by_speed: bool
    check_state_every: int
    on_nonfinite: OnNonfiniteName
    advertise: str | None
