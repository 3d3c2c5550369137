"""Parameters and interfaces of process groups, and a registry of the groups that this process holds.

The registry makes it possible to abort all groups when the code that uses them has ended.
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
        """Sum the tensor over all ranks, in place.

        Raises:
            RuntimeError: A peer is lost. The group is unusable then.
        """
        ...

    def abort(self) -> None:
        """Abort all running collectives on this rank and its peers. Thread-safe and idempotent."""
        ...


class Connector(Protocol):
    def connect(self, spec: GroupSpec) -> RankGroup:
        """Connect to all peers.

        Raises:
            RuntimeError: A peer does not connect in time.
        """
        ...

    def close(self) -> None:
        """Release resources that outlive a group. The default does nothing."""


class Abortable(Protocol):
    def abort(self) -> None: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def register_group(group: Abortable) -> None:
    _groups.add(group)


def registered() -> list[Abortable]:
    """Return the registered groups.

    The caller keeps them alive, so that Python frees them in the end. torch's C++ objects hold the interpreter's lock
    while they destroy a group, and the group's threads may wait for that lock.
    """
    return list(_groups)


def abort_all() -> None:
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):  # it had failed already
            group.abort()


def have_lost_a_peer() -> bool:
    """Check whether a peer has exited or aborted one of the groups."""
    return any(getattr(group, "has_lost_a_peer", False) for group in list(_groups))
