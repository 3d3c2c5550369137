"""What a group of ranks is connected by, and the interfaces of what connects it."""

import contextlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from torch import Tensor

from lighthouse_protocol.rules.access import STORE_WORD, prove


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """`rank` of `size` in the group that meets in the store at `store_address` under `prefix`; `host` is the address of
    this host that peers can reach, `timeout_s` bounds a collective."""

    store_address: str
    prefix: str
    rank: int
    size: int
    host: str
    connect_timeout_s: float
    timeout_s: float


def meeting_name(name: str, secret: str) -> str:
    """Name under which the members of a quorum meet in a store: `name`, and a digest that only they can compute.

    It keeps quorums apart. It hides nothing: torch's store lists its keys to any caller. Without a secret: `name`.
    """
    return f"{name}/{prove(secret, STORE_WORD, name)}" if secret else name


class RankGroup(Protocol):
    def all_reduce(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place. Raises RuntimeError when a peer is lost; the group is of no use then."""
        ...

    def abort(self) -> None:
        """End every collective under way, here and at the peers. From any thread; more than once does no harm."""
        ...


class Connector(Protocol):
    def connect(self, spec: GroupSpec) -> RankGroup:
        """Meet all peers. Raises RuntimeError if one does not come in time."""
        ...

    def close(self) -> None: ...


# -- open groups --------------------------------------------------------------
#
# The process groups that this process holds, so that all can be aborted when what uses them is over.


class Abortable(Protocol):
    def abort(self) -> None: ...


@runtime_checkable
class Connected(Protocol):
    """Of these groups it is known when a peer is gone."""

    @property
    def has_lost_a_peer(self) -> bool: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def enlist(group: Abortable) -> None:
    _groups.add(group)


def held() -> list[Abortable]:
    """They should be let go by what is in Python: torch's C++ objects hold the interpreter's lock when they end one,
    and its threads may wait for that."""
    return list(_groups)


def abort_all() -> None:
    """From any thread."""
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):  # it was of no use already
            group.abort()


def have_lost_a_peer() -> bool:
    """Whether a peer has left one of them, by its end or by an abort."""
    return any(isinstance(group, Connected) and group.has_lost_a_peer for group in list(_groups))
