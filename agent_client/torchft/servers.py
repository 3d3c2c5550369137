"""torchft's servers: its arguments over our daemons, each a child process that ends with this one.

torchft's run in threads of the training process; what a script sees is the same. A server ends with shutdown(), with
its last reference, and with its process, however that ends.
"""

import logging
import os
import sys
from datetime import timedelta

from agent_client.torchft.clients import Channel
from lighthouse_protocol.identity import Address, split_replica_id
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.net.address import served_host, split_bind
from lighthouse_runtime.process.children import ServerProcess
from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER
from lighthouse_runtime.security.client_tls import files_from

log = logging.getLogger(__name__)

_KILLED = 1
_JOIN_TIMEOUT_MS = 100


class LighthouseServer:
    """LighthouseServer is a lighthouse for tests and small jobs; others start `lighthouse serve` once, for itself.

    Args:
        bind (str): Where it listens; port 0 takes a free one.
        min_replicas (int): No quorum of fewer replica groups.
        join_timeout_ms (Optional[int]): How long a live group that has not asked is waited for. Default: 100,
            torchft's, where `lighthouse serve` waits for 60 s.
        quorum_tick_ms (Optional[int]): Nothing: a quorum forms as soon as it can, without ticks.
        heartbeat_timeout_ms (Optional[int]): After so long without a sign of life a group is dead. Default: 5 s.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        joined_within_ms = _JOIN_TIMEOUT_MS if join_timeout_ms is None else join_timeout_ms
        times = {"--join-timeout": joined_within_ms, "--heartbeat-timeout": heartbeat_timeout_ms}
        options = {
            "--bind": bind,
            "--http": "127.0.0.1:0",
            "--journal": "none",
            "--min-replicas": str(min_replicas),
            **{option: f"{ms}ms" for option, ms in times.items() if ms is not None},
        }
        self._process = ServerProcess(
            START_LIGHTHOUSE,
            options,
            variables={"LIGHTHOUSE_INSECURE": "1"},  # torchft's clients have no TLS
        )
        host = served_host(split_bind(bind, "bind")[0])
        self._address = f"http://{Address(host, int(self._process.announced))}"

    def address(self) -> str:
        """Where it can be reached.

        Returns:
            str: http://host:port.
        """
        return self._address

    def shutdown(self) -> None:
        """End it."""
        self._process.stop()


class ManagerServer:
    """ManagerServer is a replica group's manager; rank 0 makes it, and all ranks reach it by a ManagerClient.

    Args:
        replica_id (str): The group's name. Of torchft's name:uuid the name counts: our manager takes an incarnation
            of its own.
        lighthouse_addr (str): The address of the lighthouse.
        hostname (str): The name of this host that its peers can reach.
        bind (str): Where it listens; port 0 takes a free one.
        store_addr (str): The group's store.
        world_size (int): The number of ranks in the group.
        heartbeat_interval (timedelta): Nothing: our lighthouse says how often it wants to hear from a manager.
        connect_timeout (timedelta): How long the lighthouse is waited for.
        quorum_retries (int): Nothing: a request goes on until its time is over, whatever becomes of the lighthouse.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        _check_lighthouse(lighthouse_addr, connect_timeout)
        options = {
            "--replica-id": split_replica_id(replica_id)[0],
            "--advertise": hostname,
            "--bind": bind,
            "--store": store_addr,
            "--group-world-size": str(world_size),
            # Its ranks have gone, or are going: nothing is left to wait for.
            "--drain-timeout": "1ms",
        }
        self._process = ServerProcess(
            START_MANAGER,
            options,
            _end_with_manager,
            # torchft's clients show no secret: callers of this host are taken for the group's ranks.
            variables={MANAGER_SECRET_VARIABLE: "", "LIGHTHOUSE_MANAGER_LIGHTHOUSE": lighthouse_addr},
        )

    def address(self) -> str:
        """Where it can be reached.

        Returns:
            str: http://host:port.
        """
        return f"http://{self._process.announced}"

    def shutdown(self) -> None:
        """End it: the group leaves."""
        self._process.stop()


def _check_lighthouse(address: str, connect_timeout: timedelta) -> None:
    """Wait for it. Raises RuntimeError if it does not come, or is torchft's, where our managers cannot join."""
    with Channel(address, connect_timeout, files_from()) as lighthouse:
        try:
            lighthouse.call(rpcs.health(timeout_s=connect_timeout.total_seconds()), connect_timeout)
        except RuntimeError as e:
            advice = "start `lighthouse serve` there; torchft's managers need it, too"
            raise RuntimeError(f"{address} is not a Lighthouse server ({e}); {advice}") from None


def _end_with_manager(status: int) -> None:
    """Who kills a manager means its group: torchft's ends the process that it is in."""
    if status != _KILLED:
        log.error("the group's manager ended (status %d); its ranks will get no quorum", status)
        return
    log.error("the group's manager was killed; this process ends")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
