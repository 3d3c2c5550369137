"""Typed clients of a manager, synchronous and asyncio, with one method per RPC. They need no torch.

Every method takes `timeout_s` and raises a refusal of lighthouse_protocol/refusals.py.
"""

from typing import TYPE_CHECKING

from lighthouse_protocol.coordinator import Coordinator, parse_coordinator
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, Method, SyncClient

if TYPE_CHECKING:
    from lighthouse_protocol.messages.session import WatchHello
    from lighthouse_runtime.client.stream_kinds import HostStream, Watch


class _ManagerMethods:
    quorum = Method(rpcs.quorum)
    checkpoint_address = Method(rpcs.checkpoint_address)
    should_commit = Method(rpcs.should_commit)
    vote = Method(rpcs.vote)
    report = Method(rpcs.report)
    kill = Method(rpcs.manager_kill)
    torchft_kill = Method(rpcs.torchft_manager_kill)
    status = Method(rpcs.manager_status)


def manager_at(address: str, secret: str = "") -> Coordinator:
    """`address`: host:port, or that with the group's secret in it (Coordinator.join_string)."""
    return parse_coordinator(address, "address", None).with_token(secret)


class ManagerClient(_ManagerMethods, SyncClient):
    """Client of a group's manager: `status`, and the calls of a rank.

    Every method takes `timeout_s` (seconds) and raises a LighthouseError.

    Example:
        ```python
        from agent_client import ManagerClient

        with ManagerClient("localhost:29512") as client:
            print(client.status().step)
        ```
    """

    def __init__(self, address: str, secret: str = "") -> None:
        """Set the manager. The first call connects.

        Args:
            address: host:port of the manager.
            secret: Secret of the group (LIGHTHOUSE_MANAGER_SECRET). Calls of a rank need it.
        """
        super().__init__(manager_at(address, secret), ())

    def watch(self, request: "WatchHello", *, wait_for_ready: bool = False) -> "Watch":
        """Open the stream of a rank: the manager counts the rank as lost when it ends, and sends news of the quorum."""
        from lighthouse_runtime.client.stream_kinds import WATCH

        watch = self.open(WATCH, wait_for_ready)
        watch.send(request)
        return watch


class AsyncManagerClient(_ManagerMethods, AsyncClient):
    """Client of a group's manager for asyncio, with the methods of ManagerClient as coroutines."""

    def __init__(self, address: str, secret: str = "") -> None:
        super().__init__(manager_at(address, secret), ())

    def host(self) -> "HostStream":
        """Open the stream of the supervisor on another host of the group. The first message to send is a HostHello."""
        from lighthouse_runtime.client.stream_kinds import NODE

        return self.open(NODE)
