"""Servers with the names and arguments of torchft's native module, but with our daemons.

torchft's servers run as threads of the training process. Ours run as child processes, which makes no difference to a
script. A server stops on shutdown(), when its last reference is dropped, or when its parent process exits.
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


class _Server:
    _process: ServerProcess
    _address: str

    def address(self) -> str:
        """Return the address of the server, http://host:port."""
        return self._address

    def shutdown(self) -> None:
        """Stop the server."""
        self._process.stop()


class LighthouseServer(_Server):
    """A lighthouse for tests and small jobs. For other jobs, start a permanent `lighthouse serve`.

    Args:
        bind (str): Address to listen on. Port 0 selects a free port.
        min_replicas (int): Minimum number of replica groups in a quorum.
        join_timeout_ms (Optional[int]): How long a quorum waits for a live group that has not joined. Default: 100, as
            in torchft. (`lighthouse serve` waits for 60 s.)
        quorum_tick_ms (Optional[int]): Ignored, because a quorum forms as soon as it can, without polling.
        heartbeat_timeout_ms (Optional[int]): Time without a heartbeat after which a group is dead. Default: 5 s.
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


class ManagerServer(_Server):
    """Manager of a replica group. Rank 0 creates it, and all ranks connect to it with a ManagerClient.

    Args:
        replica_id (str): Name of the group, or torchft's name:uuid. The uuid is ignored, because our manager
            creates its own.
        lighthouse_addr (str): Address of the lighthouse.
        hostname (str): Name by which peers can reach this host.
        bind (str): Address to listen on. Port 0 selects a free port.
        store_addr (str): Address of the group's store.
        world_size (int): Number of ranks in the group.
        heartbeat_interval (timedelta): Ignored, because our lighthouse sets the interval.
        connect_timeout (timedelta): How long to wait for the lighthouse.
        quorum_retries (int): Ignored, because a request is retried until its time limit.
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
        with Channel(lighthouse_addr, connect_timeout, files_from()) as lighthouse:
            try:
                lighthouse.call(rpcs.health(timeout_s=connect_timeout.total_seconds()), connect_timeout)
            except RuntimeError as e:  # torchft's own lighthouse, which our managers cannot use
                advice = "start `lighthouse serve` there; torchft's managers need it, too"
                raise RuntimeError(f"{lighthouse_addr} is not a Lighthouse server ({e}); {advice}") from None
        options = {
            "--replica-id": split_replica_id(replica_id)[0],
            "--advertise": hostname,
            "--bind": bind,
            "--store": store_addr,
            "--group-world-size": str(world_size),
            # The ranks exit together with this process, so the manager need not wait for them.
            "--drain-timeout": "1ms",
        }
        self._process = ServerProcess(
            START_MANAGER,
            options,
            _end_with_manager,
            # torchft's clients send no secret, so the manager accepts all callers of this host as ranks.
            variables={MANAGER_SECRET_VARIABLE: "", "LIGHTHOUSE_MANAGER_LIGHTHOUSE": lighthouse_addr},
        )
        self._address = f"http://{self._process.announced}"


def _end_with_manager(status: int) -> None:
    """Exit this process if `status`, the manager's exit status, is that of a killed manager.

    A kill request applies to the whole group. It would also end this process with torchft's own manager, which runs
    inside the process.
    """
    if status != _KILLED:
        log.error("the group's manager ended (status %d); its ranks will get no quorum", status)
        return
    log.error("the group's manager was killed; this process ends")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
