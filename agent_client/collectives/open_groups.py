"""The process groups that this process holds, so that all can be aborted when what uses them is over."""

import contextlib
from typing import Protocol
from weakref import WeakSet


class Abortable(Protocol):
    def abort(self) -> None: ...


_groups: "WeakSet[Abortable]" = WeakSet()


def enlist(group: Abortable) -> None:
    _groups.add(group)


def abort_all() -> None:
    """From any thread."""
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):  # it was of no use already
            group.abort()
