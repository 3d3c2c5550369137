"""The process groups that this process holds, so that all can be aborted when what uses them is over."""

import contextlib
from typing import Protocol, runtime_checkable
from weakref import WeakSet


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
