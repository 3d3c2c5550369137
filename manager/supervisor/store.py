"""Runs the group's TCPStore in a child of the guard process.

The store listens on a port that is known in advance, outlives all ranks, and is restarted if it dies.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import describe_listener
from manager.guard.client import Command, Ended, GuardClient, format_output
from manager.store.process import SCRIPT, check_torch
from manager.supervisor.rules.restart_policy import describe_status

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
QUIET_S = 60.0  # if the store lives for this time, the restart delay is reset


class SupervisedStore:
    """TCPStore of a group, restarted if it dies.

    Args:
        guard: The guard process, which starts the store.
        python: The interpreter.
        port: Port of the store.
        host: Listen address of the store, or an empty string for all addresses.
        label: Name of the store in logs.
        fail: Called with the reason if the store cannot start at all.
    """

    def __init__(
        self, guard: GuardClient, python: str, port: int, host: str, label: str, fail: Callable[[str], None]
    ) -> None:
        self._guard = guard
        self._command = Command((python, str(SCRIPT), str(port), host), {}, label, is_shown=False, has_input=True)
        self._python = python
        self._port = port
        self._fail = fail
        self._delay_s = FIRST_DELAY_S
        self._started_at = 0.0
        self._has_served = False
        self._is_over = False

    def check(self) -> None:
        """Check that the store can start.

        Raises:
            InvalidRequest: If it cannot. The error says what to do.
        """
        check_torch(self._python)
        check_port(self._port)

    def start(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._guard.start(self._command, self._ended)

    def stop(self) -> None:
        """Disable restarts. The store's process exits together with the guard."""
        self._is_over = True

    def _ended(self, ended: Ended) -> None:
        if self._is_over:
            return
        self._has_served |= any(line.startswith("store ") for line in ended.output)
        status = describe_status(ended.status)
        if ended.status > 0 and not self._has_served:
            self._fail(f"the group's store does not start ({status}){format_output(ended.output)}")
            return
        loop = asyncio.get_running_loop()
        if loop.time() > self._started_at + QUIET_S:
            self._delay_s = FIRST_DELAY_S
        log.error("the group's store died (%s); restarting it on port %d for the next quorum",
                  status, self._port, extra=event("store_restarts", port=self._port))  # fmt: skip
        loop.call_later(self._delay_s, self._start_again)
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)

    def _start_again(self) -> None:
        if not self._is_over:
            self.start()


def check_port(port: int) -> None:
    """Check that the port is free.

    Raises:
        InvalidRequest: If it is not. The error names the process that listens on it, and says what to do.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise InvalidRequest(f"cannot listen on {port}: {e.strerror}", field="--store-port") from None
        raise InvalidRequest(
            f"the group's store cannot listen on {port}: {describe_listener(port)} does. Replica groups that share a "
            "host need master ports at least 3 apart (the store uses MASTER_PORT + 2): give each its own --master-port "
            "or --store-port, or --store HOST:PORT of a running TCPStore",
            field="--store-port",
        ) from None
