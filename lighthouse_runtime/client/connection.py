"""What every typed client is made of: a channel, the metadata of its calls, and how one RPC is called. No torch.

A client connects with its first call; while the other side is down, calls wait for it until their time is over and then
raise Unreachable.
"""

import asyncio
import os
from types import TracebackType
from typing import Self, TypeVar

import grpc

from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, JOB_METADATA_KEY, RUN_METADATA_KEY, TOKEN_METADATA_KEY
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.channel import async_channel, refusal, sync_channel
from lighthouse_runtime.client.rpcs import Rpc

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]


def metadata_of(job: str, token: str | None, run: str = DEFAULT_RUN) -> Metadata:
    entries = [(JOB_METADATA_KEY, job)] if job != DEFAULT_JOB else []
    if run != DEFAULT_RUN:
        entries.append((RUN_METADATA_KEY, run))
    if token:
        entries.append((TOKEN_METADATA_KEY, token))
    return tuple(entries)


class SyncClient:
    """A channel that is never used in a forked child: there it is made anew."""

    def __init__(self, address: str, metadata: Metadata) -> None:
        self.address = address
        self._metadata = metadata
        self._channel = sync_channel(address)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """In a forked child that has not used it, the channel is its parent's: closing it there would not return."""
        if os.getpid() == self._pid:
            self._channel.close()

    def connect(self, timeout_s: float) -> None:
        """Raises Unreachable if no server answers in time.

        It asks something, since watching the channel's state (channel_ready_future) makes forked children crash.
        """
        try:
            self._run(rpcs.health(), timeout_s)
        except (DeadlinePassed, Unreachable):
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None
        except LighthouseError:
            pass  # another program's answer is one, too

    def _live_channel(self) -> grpc.Channel:
        if os.getpid() != self._pid:
            self._channel, self._pid = sync_channel(self.address), os.getpid()
        return self._channel

    def _run(self, rpc: Rpc[T], timeout_s: float, wait_for_ready: bool = True) -> T:
        invoke = self._live_channel().unary_unary(
            rpc.path,
            request_serializer=type(rpc.request).SerializeToString,
            response_deserializer=rpc.answer.FromString,
        )
        try:
            answer = invoke(rpc.request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait_for_ready)
        except grpc.RpcError as e:
            raise refusal(e, self.address, timeout_s) from None
        return rpc.read(answer)


class AsyncClient:
    def __init__(self, address: str, metadata: Metadata) -> None:
        self.address = address
        self._metadata = metadata
        self._channel = async_channel(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    @property
    def is_connected(self) -> bool:
        """The other side has answered on it, if only by HTTP/2's own first frame."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> None:
        """Raises Unreachable if there is no connection in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None

    async def _run(self, rpc: Rpc[T], timeout_s: float, wait_for_ready: bool = True) -> T:
        invoke = self._channel.unary_unary(
            rpc.path,
            request_serializer=type(rpc.request).SerializeToString,
            response_deserializer=rpc.answer.FromString,
        )
        try:
            answer = await invoke(
                rpc.request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as e:
            raise refusal(e, self.address, timeout_s) from None
        return rpc.read(answer)
