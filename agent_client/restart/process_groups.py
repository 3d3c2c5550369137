"""What a wrapped function may wait for in C code, ended from another thread. torch is looked at only if it is loaded.

All groups that torch.distributed makes while the function runs end at once (torch_scope.py), and those of agent_client.
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
    """Of one call of a wrapped function. `lighthouse`: an address of that of its run; empty without one."""

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self._torch: TorchScope | None = None
        self._aborted: list[Abortable] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, generation: int) -> Generator[None]:
        """While it runs."""
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
        """The call is over."""
        if self._torch is not None:
            self._torch.close()

    def abort(self) -> None:
        """Every process group that this process holds. From any thread."""
        with self._lock:
            open_groups = sys.modules.get("agent_client.collectives.group_spec")
            if open_groups is not None:
                self._aborted += open_groups.held()
            try:
                if self._torch is not None:
                    self._torch.abort()  # first: NCCL's end together, or may wait for each other
            finally:
                if open_groups is not None:
                    open_groups.abort_all()

    def have_lost_a_peer(self) -> bool:
        """Then what the function raises may be a consequence."""
        open_groups = sys.modules.get("agent_client.collectives.group_spec")
        return open_groups is not None and open_groups.have_lost_a_peer()

    def recover(self) -> None:
        """What a generation that has not ended well has left is let go; all groups were aborted before."""
        if self._torch is not None:
            self._torch.recover()
        self._aborted.clear()
