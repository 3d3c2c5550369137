"""The options of an Agent: one frozen dataclass. The table in docs/reference/options.md is written from it.

`AgentOptions` has the same names for keyword arguments, so that type checkers and editors know each of them; a test
compares the two.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, TypedDict, get_args

from agent_client.agent.rules.world_size import WorldSize, WorldSizeMode
from agent_client.collectives.connectors import PROCESS_GROUPS, ProcessGroupName
from agent_client.errors import ConfigurationError
from agent_client.healing.rules.modes import HealMode, HealTransport, StateServing
from lighthouse_protocol.limits import QUORUM_TIMEOUT_S

StateServingName = Literal["auto", "snapshot", "hold"]
HealTransportName = Literal["http", "process_group"]
HealModeName = Literal["blocking", "catch_up"]
ReduceDtypeName = Literal["tensor", "float32"]
WorldSizeModeName = Literal["dynamic", "fixed_with_spares", "constant_batch"]
OnNonfiniteName = Literal["commit", "discard", "raise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Raises ConfigurationError, which names the field, for a value that it does not take."""

    timeout_s: float = 60.0
    """Maximum seconds of each collective and each vote. In a step in which a peer heals, `heal_timeout_s` is added."""
    connect_timeout_s: float = 10.0
    """Maximum seconds of each part of connecting to the peers of a new quorum: reaching their store, connecting, and
    with NCCL a first collective. A missing peer is waited for up to three times as long."""
    quorum_timeout_s: float = QUORUM_TIMEOUT_S
    """Maximum seconds of a request for a quorum. After it, the step is discarded and the request is repeated."""
    heal_timeout_s: float = 300.0
    """Maximum seconds of a transfer of state."""
    process_group: ProcessGroupName = "gloo"
    """What connects a rank to the same rank of the other replica groups: `gloo`, tensors of any device through the
    CPU; `nccl`, through the CUDA device; `isolated`, gloo in a child process, which can be killed; `isolated:nccl`,
    nccl in a child process. With `nccl`, make the Agent before a default process group that has NCCL, too, or set
    `TORCH_NCCL_DUMP_ON_TIMEOUT=0`: or else torch may end the process minutes after a peer was lost."""
    state_serving: StateServingName = "auto"
    """How this rank gives its state to a peer that heals: `snapshot` copies it, `hold` delays the next write until it
    is read, `auto` copies if memory allows, else holds."""
    heal_transport: HealTransportName = "http"
    """How the state of a peer travels: `http`, or `process_group`, connections of gloo, and http if they fail. The same
    in all replica groups."""
    heal_mode: HealModeName = "blocking"
    """How this group heals: `blocking`, the other groups wait for it in one step; `catch_up`, it heals beside its
    steps, and they do not wait."""
    reduce_dtype: ReduceDtypeName = "tensor"
    """How float16 and bfloat16 are averaged: `tensor`, in their own dtype, divided before they are summed, as
    torch's DDP does; `float32`, as float32, rounded at the end, for twice the bytes. The same in all groups."""
    max_consecutive_discards: int = 30
    """Number of discarded steps in a row after which AgentError is raised. Steps that another group has cost (it ended,
    its healing failed, it runs another script) do not count, nor do steps without a quorum. As many requests for a
    quorum in a row that are refused raise it, too."""
    manager_restart_timeout_s: float = 10.0
    """Seconds that a manager that has ended may take to be back, then AgentError. A manager that this rank has started
    is not waited for."""
    world_size_mode: WorldSizeModeName | WorldSizeMode = "dynamic"
    """What counts in a step: `dynamic`, the batch of each contributing group; `fixed_with_spares`, those of the first
    `world_size` groups; `constant_batch`, always `world_size` batches, dealt to the groups that are present."""
    world_size: int = 0
    """Number of batches in a step, at least 1; not used with `dynamic`."""
    check_state_every: int = 16
    """Number of steps from one comparison of a part of the parameters with those of the peers to the next; 0: none. If
    groups differ, the largest number applies; if one of them has 0, no group compares."""
    on_nonfinite: OnNonfiniteName = "discard"
    """What becomes of a step in which a gradient is infinite or not a number: `discard` repeats it, in all groups, and
    `raise` ends the rank with AgentError as well; `commit` does not look. A step that a GradScaler skips is left to it.
    If groups differ, none of them looks less than the strictest."""
    advertise: str | None = None
    """Address of this host that the peers can reach. Default: the variable LIGHTHOUSE_MANAGER_ADVERTISE; without it,
    the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; without these, the address that routes to the
    manager."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "quorum_timeout_s", "heal_timeout_s"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigurationError(f"{name}: {getattr(self, name)} is not a positive number of seconds")
        if not self.manager_restart_timeout_s >= 0:
            raise ConfigurationError(f"manager_restart_timeout_s: {self.manager_restart_timeout_s} s is negative")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.max_consecutive_discards < 1:
            raise ConfigurationError(f"max_consecutive_discards: {self.max_consecutive_discards} is not at least 1")
        if self.world_size_mode != WorldSizeMode.DYNAMIC and self.world_size < 1:
            raise ConfigurationError(f"world_size: {self.world_size}; {self.world_size_mode} needs at least 1")
        if self.check_state_every < 0:
            raise ConfigurationError(f"check_state_every: {self.check_state_every} is negative; 0 compares nothing")

    @property
    def counting(self) -> WorldSize:
        """What counts in a step."""
        return WorldSize(WorldSizeMode(self.world_size_mode), self.world_size)


def _values(kind: type[StrEnum]) -> tuple[str, ...]:
    return tuple(each.value for each in kind)


_CHOICES = {
    "process_group": PROCESS_GROUPS,
    "state_serving": _values(StateServing),
    "heal_transport": _values(HealTransport),
    "heal_mode": _values(HealMode),
    "reduce_dtype": get_args(ReduceDtypeName),
    "world_size_mode": _values(WorldSizeMode),
    "on_nonfinite": get_args(OnNonfiniteName),
}

DEFAULTS = AgentConfig()


def config_of(options: Mapping[str, Any]) -> AgentConfig:
    """Raises ConfigurationError that names the option, also for one that there is not."""
    known = [field.name for field in fields(AgentConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
            raise ConfigurationError(f"Agent.from_env has no option {name}; {advice}")
    return AgentConfig(**options)


class AgentOptions(TypedDict, total=False):
    """The fields of AgentConfig as keyword arguments."""

    timeout_s: float
    connect_timeout_s: float
    quorum_timeout_s: float
    heal_timeout_s: float
    process_group: ProcessGroupName
    state_serving: StateServingName
    heal_transport: HealTransportName
    heal_mode: HealModeName
    reduce_dtype: ReduceDtypeName
    max_consecutive_discards: int
    manager_restart_timeout_s: float
    world_size_mode: WorldSizeModeName | WorldSizeMode
    world_size: int
    check_state_every: int
    on_nonfinite: OnNonfiniteName
    advertise: str | None
