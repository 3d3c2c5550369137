"""What every typed client is made of: a channel, the metadata of its calls, and how one RPC is called. No torch.

A client connects with its first call; while the other side is down, calls wait for it until their time is over and then
raise Unreachable.
"""

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import grpc

from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, JOB_METADATA_KEY, RUN_METADATA_KEY, TOKEN_METADATA_KEY
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.channel import async_channel, refusal, sync_channel
from lighthouse_runtime.client.rpcs import Rpc, StreamKind
from lighthouse_runtime.client.streams import AsyncStream, SyncStream

T = TypeVar("T")
P = ParamSpec("P")
Sent = TypeVar("Sent")
Received = TypeVar("Received")

Metadata = tuple[tuple[str, str], ...]


def metadata_of(job: str, token: str | None, run: str = DEFAULT_RUN) -> Metadata:
    entries = [(JOB_METADATA_KEY, job)] if job != DEFAULT_JOB else []
    if run != DEFAULT_RUN:
        entries.append((RUN_METADATA_KEY, run))
    if token:
        entries.append((TOKEN_METADATA_KEY, token))
    return tuple(entries)


def _start(channel: Any, rpc: Rpc[Any], metadata: Metadata) -> Any:
    """Call `rpc`: the answer over a synchronous channel, what is to be awaited over an asyncio one."""
    method = channel.unary_unary(
        rpc.path,
        request_serializer=type(rpc.request).SerializeToString,
        response_deserializer=rpc.answer.FromString,
    )
    return method(rpc.request, timeout=rpc.timeout_s, metadata=metadata, wait_for_ready=rpc.wait_for_ready)


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
            self.invoke(rpcs.health(timeout_s=timeout_s))
        except (DeadlinePassed, Unreachable):
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None
        except LighthouseError:
            pass  # another program's answer is one, too

    def _live_channel(self) -> grpc.Channel:
        if os.getpid() != self._pid:
            self._channel, self._pid = sync_channel(self.address), os.getpid()
        return self._channel

    def invoke(self, rpc: Rpc[T]) -> T:
        try:
            answer = _start(self._live_channel(), rpc, self._metadata)
        except grpc.RpcError as e:
            raise refusal(e, self.address, rpc.timeout_s) from None
        return rpc.read(answer)

    def open(self, kind: StreamKind[Sent, Received], wait_for_ready: bool = False) -> SyncStream[Sent, Received]:
        open_ = self._live_channel().stream_stream(kind.path)
        opened = functools.partial(open_, metadata=self._metadata, wait_for_ready=wait_for_ready)
        return SyncStream(opened, self.address, kind)


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

    async def invoke(self, rpc: Rpc[T]) -> T:
        try:
            answer = await _start(self._channel, rpc, self._metadata)
        except grpc.RpcError as e:
            raise refusal(e, self.address, rpc.timeout_s) from None
        return rpc.read(answer)

    def open(self, kind: StreamKind[Sent, Received], wait_for_ready: bool = False) -> AsyncStream[Sent, Received]:
        open_ = self._channel.stream_stream(kind.path)
        return AsyncStream(open_(metadata=self._metadata, wait_for_ready=wait_for_ready), self.address, kind)


class Method(Generic[P, T]):
    """An RPC as a method: it takes the parameters of `build`, and is to be awaited in an asyncio client."""

    def __init__(self, build: Callable[P, Rpc[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: SyncClient, owner: type[SyncClient]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type[AsyncClient]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: type[object]) -> Self: ...
    def __get__(self, client: SyncClient | AsyncClient | None, owner: type[object]) -> object:
        if client is None:
            return self

        @functools.wraps(self._build)
        def method(*args: P.args, **kwargs: P.kwargs) -> object:
            return client.invoke(self._build(*args, **kwargs))

        return method
