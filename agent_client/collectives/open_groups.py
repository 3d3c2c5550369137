"""The process groups that this process holds, so that all can be aborted when what uses them is over."""

import contextlib
from typing import Protocol
from weakref import WeakSet


class Abortable(Protocol):
    def abort(self) -> None: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def enlist(group: Abortable) -> None:
    _groups.add(group)


def abort_all() -> list[Abortable]:
    """From any thread. They should be let go by what is in Python: torch's C++ objects hold the interpreter's lock when
    they end one, and its threads may wait for that."""
    groups = list(_groups)
    for group in groups:
        with contextlib.suppress(RuntimeError):  # it was of no use already
            group.abort()
    return groups
