"""Typed clients of a manager, synchronous and asyncio, one method per RPC. No torch.

Every method takes `timeout_s` and raises a refusal of lighthouse_protocol/refusals.py.
"""

from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, Method, SyncClient, metadata_of
from lighthouse_runtime.client.streams import HostStream, Watch


class _ManagerMethods:
    quorum = Method(rpcs.quorum)
    checkpoint_address = Method(rpcs.checkpoint_address)
    should_commit = Method(rpcs.should_commit)
    vote = Method(rpcs.vote)
    report = Method(rpcs.report)
    kill = Method(rpcs.manager_kill)
    torchft_kill = Method(rpcs.torchft_manager_kill)
    status = Method(rpcs.manager_status)


class ManagerClient(_ManagerMethods, SyncClient):
    def __init__(self, address: str, *, token: str | None = None) -> None:
        super().__init__(address, metadata_of(DEFAULT_JOB, token))

    def watch(self, request: WatchHello, *, wait_for_ready: bool = False) -> Watch:
        """Be watched for as long as it is open, and hear what happens to the quorum."""
        watch = self.open(rpcs.WATCH, wait_for_ready)
        watch.send(request)
        return watch


class AsyncManagerClient(_ManagerMethods, AsyncClient):
    def __init__(self, address: str, *, token: str | None = None) -> None:
        super().__init__(address, metadata_of(DEFAULT_JOB, token))

    def host(self) -> HostStream:
        """The stream of the supervisor of a further host of the group; the first message sent is a HostHello."""
        return self.open(rpcs.NODE)
