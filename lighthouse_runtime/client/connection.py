"""Base classes of the typed clients: channel, metadata, and execution of RPCs. No torch.

A client connects on its first call. If the server is down, a call with `wait_for_ready` waits up to its timeout and
then raises Unreachable. With a join string, the first call also fetches the CA certificate, once per process.
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import grpc

from lighthouse_protocol.coordinator import NO_FILES, Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import (
    DEFAULT_JOB,
    DEFAULT_RUN,
    JOB_METADATA_KEY,
    RUN_METADATA_KEY,
    TOKEN_METADATA_KEY,
    TOKEN_SCHEME,
)
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable, WrongProtocol
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.channel import async_channel, refusal, sync_channel
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.client.streams import AsyncStream, StreamKind, SyncStream
from lighthouse_runtime.security.client_tls import fetch_tls, known_tls, stamp_of_files
from lighthouse_runtime.security.serving import Locator, with_local_credentials

T = TypeVar("T")
P = ParamSpec("P")
Sent = TypeVar("Sent")
Received = TypeVar("Received")

Metadata = tuple[tuple[str, str], ...]


OPENED_WITHIN_S = 5.0  # limit for fetching the CA's certificate when a stream opens


def metadata_of(job: str, run: str = DEFAULT_RUN) -> Metadata:
    entries = [(JOB_METADATA_KEY, job)] if job != DEFAULT_JOB else []
    if run != DEFAULT_RUN:
        entries.append((RUN_METADATA_KEY, run))
    return tuple(entries)


def _with_token(metadata: Metadata, coordinator: Coordinator) -> Metadata:
    return (*metadata, (TOKEN_METADATA_KEY, TOKEN_SCHEME + coordinator.token)) if coordinator.token else metadata


def _start(channel: Any, rpc: Rpc[Any], metadata: Metadata) -> Any:
    """Execute `rpc` on a channel. Return the answer, or an awaitable if it is an asyncio channel."""
    method = channel.unary_unary(
        rpc.path,
        request_serializer=type(rpc.request).SerializeToString,
        response_deserializer=rpc.answer.FromString,
    )
    return method(rpc.request, timeout=rpc.timeout_s, metadata=metadata, wait_for_ready=rpc.wait_for_ready)


class SyncClient:
    """Base class of synchronous clients. A forked child does not reuse its parent's channel (client/channel.py)."""

    def __init__(self, coordinator: Coordinator, metadata: Metadata, role: Role | None = None) -> None:
        """Set the server, without connecting.

        Args:
            coordinator: The server.
            metadata: Metadata of every call.
            role: Role of the token to read from this user's files, if `coordinator` is a loopback without a token.
                None to read none.
        """
        self.address = str(coordinator)
        self._role = role
        self._locator = None if role is None else Locator(coordinator, role)
        self._given = self._coordinator = coordinator
        self._files_stamp: object = None
        self._given_metadata = metadata
        self._metadata = _with_token(metadata, coordinator)
        self._channel: grpc.Channel | None = None
        self._left: list[grpc.Channel] = []  # channels to former servers
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the creation of the channel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels. Does nothing in a forked child, where closing the parent's channel would hang."""
        if os.getpid() == self._pid:
            for channel in (self._channel, *self._left):
                if channel is not None:
                    channel.close()

    def _move(self, address: Address) -> None:
        """Direct further calls to another server. Open streams stay with the old one."""
        with self._lock:
            if self._coordinator.addresses != (address,):
                self._left += [self._channel] if self._channel is not None and os.getpid() == self._pid else []
                self._coordinator, self._channel = self._given.at(address), None
                self._locator = None if self._role is None else Locator(self._coordinator, self._role)
                self.address = str(address)

    def connect(self, timeout_s: float) -> None:
        """Wait until the server answers a health check.

        A call is used because watching the channel's state (channel_ready_future) makes forked children crash.

        Raises:
            Unreachable: The server did not answer in time.
            WrongProtocol: Another program answers at this address. This is raised without waiting.
        """
        try:
            self.invoke(rpcs.health(timeout_s=timeout_s))
        except WrongProtocol:
            raise
        except (DeadlinePassed, Unreachable):
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None
        except LighthouseError:
            pass  # any refusal is an answer

    def _live_channel(self, timeout_s: float, *, waits: bool) -> grpc.Channel:
        """Return a channel that this process can use, creating it if needed. Raises what fetch_tls() raises."""
        if os.getpid() != self._pid:
            self._channel, self._pid, self._lock = None, os.getpid(), threading.Lock()
        if self._channel is None or self._has_moved():
            with self._lock:
                if self._channel is None or self._has_moved():
                    self._channel = self._make_channel(timeout_s, waits=waits)
        return self._channel

    def _has_moved(self) -> bool:
        """Return whether the credentials or their files have changed. Usually takes one stat() per file."""
        files = self._coordinator.files
        if self._coordinator.has_tls and files != NO_FILES and stamp_of_files(files) != self._files_stamp:
            return True
        return self._locator is not None and self._locator.find() != self._coordinator

    def _make_channel(self, timeout_s: float, *, waits: bool) -> grpc.Channel:
        ends_at = time.monotonic() + timeout_s
        if self._locator is not None:
            self._coordinator = self._locator.wait(timeout_s) if waits else self._locator.find()
            self._metadata = _with_token(self._given_metadata, self._coordinator)
        if not self._coordinator.has_tls:
            return sync_channel(self._coordinator, None)
        self._files_stamp = stamp_of_files(self._coordinator.files)
        tls = fetch_tls(self._coordinator, max(0.0, ends_at - time.monotonic()), waits=waits)
        return sync_channel(self._coordinator, tls)

    def invoke(self, rpc: Rpc[T]) -> T:
        channel = self._live_channel(rpc.timeout_s, waits=rpc.wait_for_ready)
        try:
            answer = _start(channel, rpc, self._metadata)
        except grpc.RpcError as e:
            raise self._map_error(e, self.address, rpc.timeout_s) from None
        return rpc.read(answer)

    def _map_error(self, error: grpc.RpcError, address: str, timeout_s: float) -> LighthouseError:
        return refusal(error, address, timeout_s, self._coordinator)

    def open(self, kind: StreamKind[Sent, Received], wait_for_ready: bool = False) -> SyncStream[Sent, Received]:
        """Open a stream. Blocks while the CA certificate is fetched. Reading from the stream raises any error."""

        def opened(messages: Iterator[bytes]) -> Any:
            channel = self._live_channel(OPENED_WITHIN_S, waits=wait_for_ready)
            open_ = channel.stream_stream(kind.path)
            return open_(messages, metadata=self._metadata, wait_for_ready=wait_for_ready)

        return SyncStream(opened, self.address, kind, self._map_error)


class AsyncClient:
    def __init__(self, coordinator: Coordinator, metadata: Metadata, role: Role | None = None) -> None:
        """Set the server. The arguments have the same meaning as in SyncClient, but a local token is read only once."""
        self.address = str(coordinator)
        self._coordinator = coordinator if role is None else with_local_credentials(coordinator, role)
        self._metadata = _with_token(metadata, self._coordinator)
        self._channel: grpc.aio.Channel | None = None
        tls = known_tls(self._coordinator)
        if not self._coordinator.has_tls or tls is not None:
            self._channel = async_channel(self._coordinator, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    @property
    def is_connected(self) -> bool:
        """True if the HTTP/2 connection is established."""
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> None:
        """Wait for a connection. Raises Unreachable after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self._live_channel(timeout_s, waits=True)
                await channel.channel_ready()
        except TimeoutError:
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None

    async def _live_channel(self, timeout_s: float, *, waits: bool) -> grpc.aio.Channel:
        """Return the channel, creating it if needed. Raises what fetch_tls() raises."""
        if self._channel is None:
            tls = await asyncio.to_thread(fetch_tls, self._coordinator, timeout_s, waits=waits)
            self._channel = self._channel or async_channel(self._coordinator, tls)
        return self._channel

    async def invoke(self, rpc: Rpc[T]) -> T:
        channel = self._channel or await self._live_channel(rpc.timeout_s, waits=rpc.wait_for_ready)
        try:
            answer = await _start(channel, rpc, self._metadata)
        except grpc.RpcError as e:
            raise self._map_error(e, self.address, rpc.timeout_s) from None
        return rpc.read(answer)

    def _map_error(self, error: grpc.RpcError, address: str, timeout_s: float) -> LighthouseError:
        return refusal(error, address, timeout_s, self._coordinator)

    def open(self, kind: StreamKind[Sent, Received], wait_for_ready: bool = False) -> AsyncStream[Sent, Received]:
        def call(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[Any, Any]":
            return channel.stream_stream(kind.path)(metadata=self._metadata, wait_for_ready=wait_for_ready)

        async def opened() -> "grpc.aio.StreamStreamCall[Any, Any]":
            return call(await self._live_channel(OPENED_WITHIN_S, waits=wait_for_ready))

        opening = opened() if self._channel is None else call(self._channel)
        return AsyncStream(opening, self.address, kind, self._map_error)


class Method(Generic[P, T]):
    """Descriptor that turns a function of rpcs.py into a method of a client. In an AsyncClient, it is a coroutine."""

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
