"""Observes a rank whose script has no Agent, and reports the rank's position to the manager.

The script calls `observe`. Under `lighthouse-manager run`, the call is unnecessary.
"""

import importlib
import logging
import os
import secrets
import sys
import threading
from typing import Any

from agent_client.manager_client.watch import RankWatch
from agent_client.progress.progress import ScriptProgress
from agent_client.step.environment import Environment
from agent_client.step.stop_signals import close_at_end
from lighthouse_runtime.client.clients import ManagerClient

log = logging.getLogger(__name__)


MANAGER_KEY = "lighthouse/observer/manager"
TORCH_GROUPS = "torch.distributed.distributed_c10d"
RETRY_S = 1.0
CLOSED_WITHIN_S = 2.0

_lock = threading.Lock()
_present: "Observer | None" = None
_is_superseded = False


def observe() -> None:
    """Show this rank in `lighthouse ranks`, and report it if it falls behind the other ranks, without an Agent.

    `lighthouse ranks` then shows the rank's latest collective on any process group (torch.distributed, DDP, FSDP), and
    the current line of the script. Collectives do not become slower, because torch counts them, and a thread reads the
    counters twice a second. Under `lighthouse-manager run`, scripts are observed without this call.

    As with `Agent.from_env`, the manager's address comes from environment variables. With only LIGHTHOUSE_ADDRESS and
    REPLICA_GROUP_ID set, rank 0 starts a manager once the script has created its process group. The call returns
    immediately, and does not fail if the manager does not answer. A second call, or a call in a process with an Agent
    or a Wrapper, has no effect.

    Raises:
        ConfigurationError: An environment variable is missing or invalid. The message names the variable.

    Example:
        ```python
        import agent_client

        agent_client.observe()
        torch.distributed.init_process_group()
        ```
    """
    global _present
    environment = Environment.read()
    with _lock:
        if not _is_superseded and (_present is None or _present.pid != os.getpid()):
            _present = Observer(environment)


def stop_observing() -> None:
    """Stop observing, because an Agent or a Wrapper now reports this rank's position."""
    global _is_superseded
    with _lock:
        _is_superseded = True
        observer = _present
    if observer is not None and observer.pid == os.getpid():
        observer.close()


class Observer:
    def __init__(self, environment: Environment) -> None:
        self.pid = os.getpid()
        self._environment = environment
        self._closed = threading.Event()
        self._manager: Any = None  # process of the manager if this rank has started it
        self._thread = threading.Thread(target=self._run, name="lighthouse observer", daemon=True)
        self._thread.start()
        close_at_end(self, is_of_process=True)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSED_WITHIN_S)
        if self._manager is not None:
            self._manager.stop()

    def _run(self) -> None:
        try:
            address = self._environment.manager or self._find_manager()
            if not address:
                return
            with ManagerClient(address) as client:
                rank, incarnation = self._environment.group_rank, secrets.token_hex(6)
                watch = RankWatch(client, rank, incarnation, ScriptProgress(), is_observer=True)
                while not self._closed.is_set():
                    watch.ensure_open(wait_for_ready=True)
                    self._closed.wait(RETRY_S)
                watch.close(None)
        except Exception:
            log.warning("this rank cannot be observed: `lighthouse ranks` will not show it", exc_info=True)

    def _find_manager(self) -> str:
        """Return the address of the manager that rank 0 starts, or an empty string if the observer is closed first."""
        while (store := _script_store()) is None:
            if self._closed.wait(RETRY_S):
                return ""
        from agent_client.step.rendezvous import read_manager, start_announced  # torch, which the script has imported

        if self._environment.group_rank == 0:
            self._manager, _, announced = start_announced(self._environment)
            store.set(MANAGER_KEY, announced)
        while not store.check([MANAGER_KEY]):  # get() would block the store for the script
            if self._closed.wait(RETRY_S):
                return ""
        return read_manager(self._environment, store.get(MANAGER_KEY).decode())


def _script_store() -> Any:
    """Return the store of the script's process group, or None if there is none.

    Do not import torch if the script has not. If another thread is importing torch, wait until it has finished, because
    the module lacks some functions until then.
    """
    if TORCH_GROUPS not in sys.modules:
        return None
    module: Any = importlib.import_module(TORCH_GROUPS)
    return module._get_default_store() if module.is_initialized() else None
