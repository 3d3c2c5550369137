"""Parameters and interfaces of process groups, and a registry of this process's groups.

The registry makes it possible to abort all groups at once, including those that the script has made.
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
