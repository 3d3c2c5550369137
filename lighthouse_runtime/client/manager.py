"""Typed clients of a manager, synchronous and asyncio, one method per RPC. No torch.

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
    """`secret`: of the group, for its ranks; peers have none."""

    def __init__(self, address: str, secret: str = "") -> None:
        super().__init__(manager_at(address, secret), ())

    def watch(self, request: "WatchHello", *, wait_for_ready: bool = False) -> "Watch":
        """Be watched for as long as it is open, and hear what happens to the quorum."""
        from lighthouse_runtime.client.stream_kinds import WATCH

        watch = self.open(WATCH, wait_for_ready)
        watch.send(request)
        return watch


class AsyncManagerClient(_ManagerMethods, AsyncClient):
    """As ManagerClient."""

    def __init__(self, address: str, secret: str = "") -> None:
        super().__init__(manager_at(address, secret), ())

    def host(self) -> "HostStream":
        """The stream of the supervisor of a further host of the group; the first message sent is a HostHello."""
        from lighthouse_runtime.client.stream_kinds import NODE

        return self.open(NODE)
