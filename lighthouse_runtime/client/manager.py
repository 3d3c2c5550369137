"""Typed clients of a manager, synchronous and asyncio, one method per RPC. No torch.

Every method takes `timeout_s` and raises a refusal of lighthouse_protocol/refusals.py.
"""

import functools

from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, Vote
from lighthouse_protocol.messages.session import WatchRequest
from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, SyncClient, metadata_of
from lighthouse_runtime.client.streams import AsyncWatch, NodeStream, Watch


class ManagerClient(SyncClient):
    def __init__(self, address: str, *, token: str | None = None) -> None:
        super().__init__(address, metadata_of(DEFAULT_JOB, token))

    def quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_address: str = "",
        *,
        timeout_s: float,
        tag_quorum_id: int | None = None,
        shrink_only: bool = False,
        init_sync: bool = True,
        commit_failures: int = 0,
        worker: str = "",
        catch_up: CatchUp = PLAIN,
        compares: bool = False,
        distrust: Distrust | None = None,
        heals_first: bool | None = None,
        wait_for_ready: bool = True,
    ) -> Assignment:
        """One rank's request for a quorum; answered when every rank of the group has asked and one has formed.

        `worker` names the rank's process: new at every start of it. Without `wait_for_ready` a manager that cannot be
        reached raises Unreachable at once.
        """
        rpc = rpcs.quorum(
            group_rank,
            step,
            checkpoint_address,
            tag_quorum_id=tag_quorum_id,
            shrink_only=shrink_only,
            init_sync=init_sync,
            commit_failures=commit_failures,
            worker=worker,
            catch_up=catch_up,
            compares=compares,
            distrust=distrust,
            heals_first=heals_first,
        )
        return self._run(rpc, timeout_s, wait_for_ready)

    def checkpoint_address(self, group_rank: int, step: int | None = None, *, timeout_s: float = 10.0) -> str:
        """Where that rank of this manager's group serves its state, if it is at `step`."""
        return self._run(rpcs.checkpoint_address(group_rank, step), timeout_s, wait_for_ready=False)

    def should_commit(
        self, group_rank: int, step: int, vote: bool, *, timeout_s: float, quorum_id: int | None = None
    ) -> bool:
        """Vote; the decision of all ranks of the group."""
        return self.vote(group_rank, step, vote, timeout_s=timeout_s, quorum_id=quorum_id).commit

    def vote(
        self,
        group_rank: int,
        step: int,
        vote: bool,
        *,
        timeout_s: float,
        quorum_id: int | None = None,
        wants_next: bool = False,
        wait_for_ready: bool = True,
    ) -> Vote:
        """Vote, and the decision of all ranks of the group. With `wants_next` a commit may bring the grant of the next
        step, as an answer to quorum() would. `wait_for_ready` as in quorum()."""
        return self._run(rpcs.vote(group_rank, step, vote, quorum_id, wants_next), timeout_s, wait_for_ready)

    def watch(self, request: WatchRequest, *, wait_for_ready: bool = False) -> Watch:
        """Be watched for as long as it is open, and hear what happens to the quorum."""
        call = self._live_channel().stream_stream(rpcs.WATCH)
        open_ = functools.partial(call, metadata=self._metadata, wait_for_ready=wait_for_ready)
        return Watch(open_, self.address, request)

    def report(
        self, group_rank: int, worker: str, reason: str, *, ends_group: bool = False, timeout_s: float = 1.0
    ) -> None:
        """Say why this rank is about to end, with `ends_group` its whole group. `worker` is that of its watch."""
        self._run(rpcs.report(group_rank, worker, reason, ends_group), timeout_s, wait_for_ready=False)

    def kill(self, msg: str = "", *, timeout_s: float = 10.0) -> None:
        self._run(rpcs.manager_kill(msg), timeout_s, wait_for_ready=False)

    def status(self, *, timeout_s: float = 5.0) -> ManagerStatus:
        return self._run(rpcs.manager_status(), timeout_s, wait_for_ready=False)


class AsyncManagerClient(AsyncClient):
    def __init__(self, address: str, *, token: str | None = None) -> None:
        super().__init__(address, metadata_of(DEFAULT_JOB, token))

    async def quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_address: str = "",
        *,
        timeout_s: float,
        tag_quorum_id: int | None = None,
        shrink_only: bool = False,
        init_sync: bool = True,
        commit_failures: int = 0,
        worker: str = "",
        catch_up: CatchUp = PLAIN,
        compares: bool = False,
        distrust: Distrust | None = None,
        heals_first: bool | None = None,
    ) -> Assignment:
        """One rank's request for a quorum; answered when every rank of the group has asked and one has formed.

        `worker` names the rank's process: new at every start of it.
        """
        rpc = rpcs.quorum(
            group_rank,
            step,
            checkpoint_address,
            tag_quorum_id=tag_quorum_id,
            shrink_only=shrink_only,
            init_sync=init_sync,
            commit_failures=commit_failures,
            worker=worker,
            catch_up=catch_up,
            compares=compares,
            distrust=distrust,
            heals_first=heals_first,
        )
        return await self._run(rpc, timeout_s)

    async def checkpoint_address(self, group_rank: int, step: int | None = None, *, timeout_s: float = 10.0) -> str:
        """Where that rank of this manager's group serves its state, if it is at `step`."""
        return await self._run(rpcs.checkpoint_address(group_rank, step), timeout_s)

    async def should_commit(
        self, group_rank: int, step: int, vote: bool, *, timeout_s: float, quorum_id: int | None = None
    ) -> bool:
        """Vote; the decision of all ranks of the group."""
        return (await self.vote(group_rank, step, vote, timeout_s=timeout_s, quorum_id=quorum_id)).commit

    async def vote(
        self,
        group_rank: int,
        step: int,
        vote: bool,
        *,
        timeout_s: float,
        quorum_id: int | None = None,
        wants_next: bool = False,
    ) -> Vote:
        """Vote, and the decision of all ranks of the group. With `wants_next` a commit may bring the grant of the next
        step, as an answer to quorum() would."""
        return await self._run(rpcs.vote(group_rank, step, vote, quorum_id, wants_next), timeout_s)

    def watch(self, request: WatchRequest, *, wait_for_ready: bool = False) -> AsyncWatch:
        """Be watched for as long as it is open, and hear what happens to the quorum."""
        open_ = self._channel.stream_stream(rpcs.WATCH)
        return AsyncWatch(open_(metadata=self._metadata, wait_for_ready=wait_for_ready), self.address, request)

    def node(self) -> NodeStream:
        """The stream of the supervisor of a further host of the group; the first message sent is a NodeEntry."""
        return NodeStream(self._channel.stream_stream(rpcs.NODE)(metadata=self._metadata), self.address)

    async def report(
        self, group_rank: int, worker: str, reason: str, *, ends_group: bool = False, timeout_s: float = 1.0
    ) -> None:
        """Say why this rank is about to end, with `ends_group` its whole group. `worker` is that of its watch."""
        await self._run(rpcs.report(group_rank, worker, reason, ends_group), timeout_s, wait_for_ready=False)

    async def kill(self, msg: str = "", *, timeout_s: float = 10.0) -> None:
        await self._run(rpcs.manager_kill(msg), timeout_s, wait_for_ready=False)

    async def torchft_kill(self, msg: str = "", *, timeout_s: float = 10.0) -> None:
        """The same for a manager of torchft's own."""
        await self._run(rpcs.torchft_manager_kill(msg), timeout_s, wait_for_ready=False)

    async def status(self, *, timeout_s: float = 5.0) -> ManagerStatus:
        return await self._run(rpcs.manager_status(), timeout_s, wait_for_ready=False)
