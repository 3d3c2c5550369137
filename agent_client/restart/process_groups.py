"""Aborts the process groups of a wrapped function from another thread.

A function is often blocked in C code, waiting for a peer that has died, where no exception can be raised. Aborting its
process groups ends the wait. This covers all groups that torch.distributed creates while the function runs
(torch_scope.py), and the groups of agent_client. This module never imports torch.
"""

import contextlib
import sys
import threading
import typing
from collections.abc import Generator

if typing.TYPE_CHECKING:
    from agent_client.collectives.group_spec import Abortable
    from agent_client.restart.torch_scope import TorchScope


class ProcessGroups:
    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self._torch: TorchScope | None = None
        self._aborted: list[Abortable] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, generation: int) -> Generator[None]:
        if self._torch is None and "torch" in sys.modules and sys.modules["torch"].distributed.is_available():
            from agent_client.restart.torch_scope import TorchScope

            self._torch = TorchScope(self._lighthouse)
        if self._torch is None:
            yield
            return
        self._torch.begin(generation)
        try:
            yield
        finally:
            self._torch.end()

    def close(self) -> None:
        if self._torch is not None:
            self._torch.close()

    def abort(self) -> None:
        with self._lock:
            open_groups = sys.modules.get("agent_client.collectives.group_spec")
            if open_groups is not None:
                self._aborted += open_groups.registered()
            try:
                if self._torch is not None:
                    self._torch.abort()  # first, because NCCL groups that are not aborted together may block each other
            finally:
                if open_groups is not None:
                    open_groups.abort_all()

    def have_lost_a_peer(self) -> bool:
        """Return whether a peer was lost, which may have caused the function's exception."""
        open_groups = sys.modules.get("agent_client.collectives.group_spec")
        return open_groups is not None and open_groups.have_lost_a_peer()

    def recover(self) -> None:
        if self._torch is not None:
            self._torch.recover()
        self._aborted.clear()
