"""Parameters and interfaces of process groups, and a registry of this process's groups.

With the registry, all groups can be aborted at once, including those that the script has created.
"""

import contextlib
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from torch import Tensor


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
        """Sum the tensor over all ranks, in place. Raise RuntimeError if a peer is lost. All later calls then fail."""
        ...

    def abort(self) -> None:
        """Abort all running collectives on this rank and its peers. Thread-safe and idempotent."""
        ...


class Connector(Protocol):
    def connect(self, spec: GroupSpec) -> RankGroup:
        """Create a group that is connected to all peers. Raise RuntimeError if a peer does not connect in time."""
        ...

    def close(self) -> None:
        """Release the resources that this connector's groups share. The default does nothing."""


class Abortable(Protocol):
    def abort(self) -> None: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def register_group(group: Abortable) -> None:
    _groups.add(group)


def registered() -> list[Abortable]:
    """Return the process groups that were passed to `register_group` and still exist.

    A caller that aborts a group must keep it referenced. Otherwise, torch's C++ code may drop the last reference and
    deadlock: it would hold the GIL while waiting for the group's threads, which may need the GIL.
    """
    return list(_groups)


def abort_all() -> None:
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):  # the group had already failed
            group.abort()


def has_lost_peer() -> bool:
    """Return whether a peer of any of this process's groups has exited or aborted the group."""
    return any(getattr(group, "has_lost_peer", False) for group in list(_groups))
