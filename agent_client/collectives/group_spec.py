"""The kinds of process groups that can connect a rank to the same rank of the other replica groups.

- `gloo`: any tensor, through the CPU. Aborted by closing its connections.
- `nccl`: through the CUDA device. Aborted by NCCL's own abort.
- `isolated`: gloo in a child process, which is killed to abort it. `isolated:nccl` does the same with NCCL.

A connector creates one group per quorum. A registry of this process's groups makes it possible to abort all of them at
once, including those that the script has made.
"""

import contextlib
from dataclasses import dataclass
from typing import Literal, Protocol, get_args
from weakref import WeakSet

from torch import Tensor

from agent_client.errors import ConfigurationError

ProcessGroupName = Literal["gloo", "nccl", "isolated", "isolated:nccl"]
PROCESS_GROUPS: tuple[str, ...] = get_args(ProcessGroupName)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    store_address: str
    prefix: str
    rank: int
    size: int
    host: str
    connect_timeout_s: float
    timeout_s: float


class RankGroup(Protocol):
    def all_reduce(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """Sum the tensor over all ranks, in place. Raises RuntimeError if a peer is lost, after which no call works."""
        ...

    def abort(self) -> None:
        """Abort all running collectives on this rank and its peers. Thread-safe and idempotent."""
        ...


class Connector(Protocol):
    def connect(self, spec: GroupSpec) -> RankGroup:
        """Create a group, connected to all peers. Raises RuntimeError if one does not connect in time."""
        ...

    def close(self) -> None:
        """Release resources that the groups share. The default does nothing."""


def connector(name: str, device: int | None = None) -> Connector:
    """Create the connector for one of PROCESS_GROUPS.

    `device` is the index of the CUDA device for NCCL. Default: the current device.

    Raises:
        ConfigurationError: The name is unknown, or this kind is not available on this host.
    """
    match name:
        case "gloo":
            from agent_client.collectives.gloo import GlooConnector

            return GlooConnector()
        case "nccl":
            from agent_client.collectives.nccl import NcclConnector

            return NcclConnector(device)
        case "isolated" | "isolated:nccl":
            from agent_client.collectives.isolated import IsolatedConnector

            return IsolatedConnector(name.partition(":")[2] or "gloo")
        case _:
            raise ConfigurationError(f"process_group: {name!r} is not one of {', '.join(PROCESS_GROUPS)}")


class Abortable(Protocol):
    def abort(self) -> None: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def register_group(group: Abortable) -> None:
    _groups.add(group)


def registered() -> list[Abortable]:
    """Return the registered groups.

    The caller must keep references to them, so that Python destroys the groups. If torch's C++ objects did it, they
    would hold the GIL while waiting for the group's threads, which may need the GIL.
    """
    return list(_groups)


def abort_all() -> None:
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):  # it had failed already
            group.abort()


def have_lost_a_peer() -> bool:
    """Return whether any of this process's process groups has a peer that has exited or aborted it."""
    return any(getattr(group, "has_lost_a_peer", False) for group in list(_groups))
