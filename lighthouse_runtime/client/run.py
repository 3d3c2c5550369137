"""What a client can say and ask about one run of a job: its streams, its keys, what it is, its stop. No torch.

Which run is the client's own; it goes as metadata.
"""

import functools
from typing import Literal

from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, SyncClient
from lighthouse_runtime.client.streams import AsyncRankStream, RankStream, SupervisorStream


class RunClient(SyncClient):
    def rank(self, *, wait_for_ready: bool = False) -> RankStream:
        """A rank's stream; the first message sent is an Entry."""
        open_ = self._live_channel().stream_stream(rpcs.RANK)
        opened = functools.partial(open_, metadata=self._metadata, wait_for_ready=wait_for_ready)
        return RankStream(opened, self.address)

    def put_key(self, generation: int, kind: KeyKind, name: str, value: bytes, *, timeout_s: float = 5.0) -> None:
        """Raises WrongState if `generation` is not the present one."""
        self._run(rpcs.put_key(generation, kind, name, value), timeout_s)

    def get_keys(
        self, generation: int | None = None, kind: KeyKind | Literal[""] = "", name: str = "", *, timeout_s: float = 5.0
    ) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
        """The present generation and its keys. Raises WrongState if `generation` is another one."""
        return self._run(rpcs.get_keys(generation, kind, name), timeout_s)

    def runs(self, run: str = "", *, timeout_s: float = 5.0) -> tuple[RunStatus, ...]:
        """Of `run`, or of every run of the job."""
        return self._run(rpcs.runs(run), timeout_s, wait_for_ready=False)

    def stop_run(self, reason: str, *, timeout_s: float = 10.0) -> None:
        """End the run for all of it, until it is resumed."""
        self._run(rpcs.stop_run(reason), timeout_s, wait_for_ready=False)

    def resume_run(self, *, timeout_s: float = 10.0) -> None:
        """Lift a stop, and let excluded hosts in again."""
        self._run(rpcs.resume_run(), timeout_s, wait_for_ready=False)


class AsyncRunClient(AsyncClient):
    def rank(self, *, wait_for_ready: bool = False) -> AsyncRankStream:
        """A rank's stream; the first message sent is an Entry. Without `wait_for_ready` its reader learns it at once
        when no server is there."""
        open_ = self._channel.stream_stream(rpcs.RANK)
        return AsyncRankStream(open_(metadata=self._metadata, wait_for_ready=wait_for_ready), self.address)

    def supervise(self, *, wait_for_ready: bool = False) -> SupervisorStream:
        """A supervisor's stream; the first message sent is a SupervisorEntry."""
        open_ = self._channel.stream_stream(rpcs.SUPERVISE)
        return SupervisorStream(open_(metadata=self._metadata, wait_for_ready=wait_for_ready), self.address)

    async def put_key(self, generation: int, kind: KeyKind, name: str, value: bytes, *, timeout_s: float = 5.0) -> None:
        """Raises WrongState if `generation` is not the present one."""
        await self._run(rpcs.put_key(generation, kind, name, value), timeout_s)

    async def get_keys(
        self, generation: int | None = None, kind: KeyKind | Literal[""] = "", name: str = "", *, timeout_s: float = 5.0
    ) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
        """The present generation and its keys. Raises WrongState if `generation` is another one."""
        return await self._run(rpcs.get_keys(generation, kind, name), timeout_s)

    async def runs(self, run: str = "", *, timeout_s: float = 5.0) -> tuple[RunStatus, ...]:
        """Of `run`, or of every run of the job."""
        return await self._run(rpcs.runs(run), timeout_s, wait_for_ready=False)

    async def stop_run(self, reason: str, *, timeout_s: float = 10.0) -> None:
        """End the run for all of it, until it is resumed."""
        await self._run(rpcs.stop_run(reason), timeout_s, wait_for_ready=False)

    async def resume_run(self, *, timeout_s: float = 10.0) -> None:
        """Lift a stop, and let excluded hosts in again."""
        await self._run(rpcs.resume_run(), timeout_s, wait_for_ready=False)
