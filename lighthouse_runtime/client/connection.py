"""Base classes of the typed clients. They open channels, execute RPCs and turn gRPC errors into LighthouseErrors.

No torch. A client connects on its first call. If the server is down, a call with `wait_for_ready` waits up to its
timeout and then raises Unreachable. With a join string, the first call also fetches the CA certificate, once per
process.
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Self, TypeVar, cast, overload

import grpc
import grpc.aio

from lighthouse_protocol.coordinator import NO_FILES, Coordinator, token_command
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import (
    DEFAULT_JOB,
    DEFAULT_RUN,
    JOB_METADATA_KEY,
    LEADER_METADATA_KEY,
    LIGHTHOUSE_HTTP_PORT,
    LIGHTHOUSE_PORT,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    REFUSAL_METADATA_KEY,
    RUN_METADATA_KEY,
    TOKEN_METADATA_KEY,
    TOKEN_SCHEME,
    cut_reason,
)
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    LighthouseError,
    NotLeader,
    NotServed,
    Unreachable,
    Untrusted,
    WrongProtocol,
    WrongState,
)
from lighthouse_protocol.rules.access import Role
from lighthouse_protocol.wire.codec import error_of
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import (
    ClientTls,
    bad_certificate_message,
    fetch_tls,
    http_port_message,
    known_tls,
    no_tls_message,
    port_of,
    refused_client_message,
    stamp_of_files,
)
from lighthouse_runtime.security.serving import Locator, with_local_credentials

if TYPE_CHECKING:
    from lighthouse_runtime.client.streams import AsyncStream, StreamKind, SyncStream

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


# Forks. A forked child of a process that has used gRPC must not use it, and gets an error if it tries.
#
# The child lacks gRPC's threads, so its calls would wait forever, past their deadlines. gRPC's fork support restarts
# the threads, but if a thread of the parent was in a call at that moment (nearly always, with an open stream), the
# child sometimes aborts and the parent's stream may break. So our processes disable it (GRPC_ENABLE_FORK_SUPPORT=0),
# and creating a channel in a child raises an error. With 1, as gRPC's documentation advises, a fork waits until gRPC
# is idle, and the child may use it.

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_TRUE = ("1", "true", "yes")  # as gRPC reads it

_is_used = False


def mark_grpc_used() -> None:
    """Record that this process uses gRPC. Children forked later cannot use it."""
    global _is_used
    _is_used = True


def _refuse(*_: object, **__: object) -> NoReturn:
    raise WrongState(
        f"process {os.getpid()} was forked from one that uses gRPC, and a call of its own would never end: start it "
        f"with multiprocessing's spawn or forkserver, or set {VARIABLE}=1 before the parent starts (a fork may then "
        "take 5 s); lighthouse-manager run --observe off leaves a script without an Agent alone"
    )


def _after_fork() -> None:
    if _is_used and os.environ.get(VARIABLE, "").lower() not in _TRUE:
        for module in (grpc, grpc.aio):
            for make_channel in ("insecure_channel", "secure_channel"):
                setattr(module, make_channel, _refuse)


os.register_at_fork(after_in_child=_after_fork)


UNACKNOWLEDGED_MS = 20_000  # after this time without an acknowledgement from the peer's kernel, a connection is lost

# Never lower grpc.min_reconnect_backoff_ms: it is also the connect timeout, and a thousand clients that join at once
# would live-lock. Proxies of the environment are ignored within a training job.
#
# gRPC sets TCP_USER_TIMEOUT to the timeout of a keepalive. Without it, a connection to a host that has lost power stays
# open for 15 minutes. The keepalive's pings are never due, because they would close a connection to a paused process.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 2**31 - 2),
    ("grpc.keepalive_timeout_ms", UNACKNOWLEDGED_MS),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.bdp_probe", 0),  # as in server/grpc_server.py
    ("grpc.http2.lookahead_bytes", 2**20),  # replaces the probe; a list of 10,000 groups has this size
]

# grpc.aio's details, in place of the server's, if the server closes a stream while the client writes.
_BROKEN_WHILE_WRITING = "Internal error from Core"


def open_channel(api: Any, coordinator: Coordinator, tls: ClientTls | None) -> Any:
    """Open a gRPC channel to the first address, without TLS if `tls` is None.

    `api` is the module to use, grpc or grpc.aio. Raise WrongState in a forked child that cannot use gRPC.
    """
    mark_grpc_used()
    address = str(coordinator.addresses[0])
    if tls is None:
        return api.insecure_channel(address, options=_OPTIONS)
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", tls.name)] if tls.name else _OPTIONS
    return api.secure_channel(address, grpc.ssl_channel_credentials(tls.roots, tls.key, tls.cert), options=options)


def refusal(error: grpc.RpcError, address: str, timeout_s: float, asked: Coordinator | None = None) -> LighthouseError:
    """Convert the gRPC error of a failed call or stream to a LighthouseError that names the server's `address`.

    `timeout_s` is the timeout of the call. `asked`, if given, has the client's TLS settings, which help to explain a
    failed handshake.
    """
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    status, details = error.code(), error.details() or ""
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    if metadata.get(REFUSAL_METADATA_KEY) == NotLeader.__name__:
        return NotLeader(f"{address}: {cut_reason(details)}", leader=metadata.get(LEADER_METADATA_KEY, ""))
    if REFUSAL_METADATA_KEY in metadata:
        return error_of(status, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{address} did not answer within {timeout_s:g} s")
    if status is grpc.StatusCode.INTERNAL and details == _BROKEN_WHILE_WRITING:
        return Unreachable(f"{address} closed the stream during a write")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # a stopping server cancels calls
        return _unreachable(address, details, asked)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NotServed(
            f"{address} speaks gRPC but does not know this call: a manager's port instead of a lighthouse's (or the "
            "reverse), or another version; fix the address, or install the same version everywhere"
        )
    return error_of(status, details)


def _unreachable(address: str, details: str, asked: Coordinator | None) -> Unreachable:
    """Return an exception that explains why gRPC could not connect.

    `details` is gRPC's message. `asked`, if given, has the client's TLS settings.
    """
    if "http1.x server" in details or "missing selected ALPN" in details:
        return WrongProtocol(http_port_message(address))
    if "Failed parsing HTTP/2" in details:
        return WrongProtocol(f"{address} is unreachable: the service at this port does not speak gRPC")
    if "Connection refused" in details:
        return Unreachable(f"{address} is unreachable: connection refused; is it running at this address?")
    if "errors resolving" in details or "DNS resolution failed" in details:
        return Unreachable(f"{address} is unreachable: this host cannot resolve the name; fix the name or the DNS")
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        ca_file = "" if asked is None or asked.ca_pin else asked.files.ca
        return Untrusted(bad_certificate_message(address, details.rpartition("CERTIFICATE_VERIFY_FAILED:")[2], ca_file))
    if "WRONG_VERSION_NUMBER" in details:
        return WrongProtocol(no_tls_message(address))
    if details.startswith("failed to connect") and "Socket closed" in details and asked is not None and asked.has_tls:
        return Unreachable(refused_client_message(address, asked.files))
    if details.startswith("failed to connect") and "Socket closed" in details:
        command = token_command(port_of(address), "join")
        of_http = f"; by default {LIGHTHOUSE_HTTP_PORT} is the port of its web page, and {LIGHTHOUSE_PORT} that of gRPC"
        return Unreachable(
            f"{address} is unreachable: it closes connections at once, as a lighthouse with TLS does to clients "
            f"without TLS; pass its join string, which {command} prints on its host, or --tls-ca for your own PKI"
            f"{of_http if port_of(address) == LIGHTHOUSE_HTTP_PORT else ''}"
        )
    return Unreachable(f"{address} is unreachable: {details}")


class SyncClient:
    """Base class of synchronous clients. A forked child never uses its parent's channel."""

    def __init__(self, coordinator: Coordinator, metadata: Metadata, role: Role | None = None) -> None:
        """Create a client without connecting.

        If `coordinator` is a loopback address without a token and `role` is given, a token of that role is read
        from this user's files.
        """
        self.address = str(coordinator)
        self._role = role
        self._locator = None if role is None else Locator(coordinator, role)
        self._given = self._coordinator = coordinator
        self._files_stamp: object = None
        self._given_metadata = metadata
        self._metadata = _with_token(metadata, coordinator)
        self._channel: grpc.Channel | None = None
        # Channels to former servers, each with the coordinator and the files for which it was created.
        self._former: dict[tuple[Address, ...], tuple[grpc.Channel, Coordinator, object]] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the creation of the channel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels. Do nothing in a forked child, where closing the parent's channel would hang."""
        if os.getpid() == self._pid:
            for channel in (self._channel, *(channel for channel, _, _ in self._former.values())):
                if channel is not None:
                    channel.close()

    def _move(self, address: Address) -> None:
        """Direct later calls to another server. Open streams and their channel stay with the previous server."""
        with self._lock:
            if self._coordinator.addresses != (address,):
                if self._channel is not None and os.getpid() == self._pid:
                    self._former[self._coordinator.addresses] = self._channel, self._coordinator, self._files_stamp
                new = self._given.at(address)
                self._channel, self._coordinator, self._files_stamp = self._former.pop((address,), (None, new, None))
                self._metadata = _with_token(self._given_metadata, self._coordinator)
                self._locator = None if self._role is None else Locator(new, self._role)
                self.address = str(address)

    def connect(self, timeout_s: float) -> None:
        """Wait until the server answers a health check. Raise Unreachable if it does not answer in time.

        If another program serves the port, raise WrongProtocol at once. Watching the channel's state instead
        (channel_ready_future) would make forked children crash.
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
        """Return a channel that this process can use, creating it if needed. Raise the errors of fetch_tls().

        `timeout_s` limits the time for fetching the CA certificate. With `waits`, retry while the server is down.
        """
        if os.getpid() != self._pid:
            self._channel, self._pid, self._lock, self._former = None, os.getpid(), threading.Lock(), {}
        channel = self._channel  # another thread may call _move() at any time
        if channel is None or self._has_moved():
            with self._lock:
                channel = self._channel
                if channel is None or self._has_moved():
                    channel = self._channel = self._make_channel(timeout_s, waits=waits)
        return channel

    def _has_moved(self) -> bool:
        """Return whether the server's credentials or their files have changed. Usually takes one stat() per file."""
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
            return open_channel(grpc, self._coordinator, None)
        self._files_stamp = stamp_of_files(self._coordinator.files)
        tls = fetch_tls(self._coordinator, max(0.0, ends_at - time.monotonic()), waits=waits)
        return open_channel(grpc, self._coordinator, tls)

    def invoke(self, rpc: Rpc[T]) -> T:
        channel = self._live_channel(rpc.timeout_s, waits=rpc.wait_for_ready)
        try:
            answer = _start(channel, rpc, self._metadata)
        except grpc.RpcError as e:
            raise self._map_error(e, self.address, rpc.timeout_s) from None
        return rpc.read(answer)

    def _map_error(self, error: grpc.RpcError, address: str, timeout_s: float) -> LighthouseError:
        return refusal(error, address, timeout_s, self._coordinator)

    def open(self, kind: "StreamKind[Sent, Received]", wait_for_ready: bool = False) -> "SyncStream[Sent, Received]":
        """Open a stream. Block while the CA certificate is fetched. Any error is raised when the stream is read."""

        def opened(messages: Iterator[bytes]) -> Any:
            channel = self._live_channel(OPENED_WITHIN_S, waits=wait_for_ready)
            open_ = channel.stream_stream(kind.path)
            return open_(messages, metadata=self._metadata, wait_for_ready=wait_for_ready)

        from lighthouse_runtime.client.streams import SyncStream

        return SyncStream(opened, self.address, kind, self._map_error)


class AsyncClient:
    def __init__(self, coordinator: Coordinator, metadata: Metadata, role: Role | None = None) -> None:
        """Create a client. Arguments are those of SyncClient, but a token in this user's files is read only once."""
        self.address = str(coordinator)
        self._coordinator = coordinator if role is None else with_local_credentials(coordinator, role)
        self._metadata = _with_token(metadata, self._coordinator)
        self._channel: grpc.aio.Channel | None = None
        tls = known_tls(self._coordinator)
        if not self._coordinator.has_tls or tls is not None:
            self._channel = open_channel(grpc.aio, self._coordinator, tls)

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
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> None:
        """Wait for a connection. Raise Unreachable after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                channel = await self._live_channel(timeout_s, waits=True)
                await channel.channel_ready()
        except TimeoutError:
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None

    async def _live_channel(self, timeout_s: float, *, waits: bool) -> grpc.aio.Channel:
        """Return the channel, creating it if needed. Raise the errors of fetch_tls().

        `timeout_s` limits the time for fetching the CA certificate. With `waits`, retry while the server is down.
        """
        if self._channel is None:
            tls = await asyncio.to_thread(fetch_tls, self._coordinator, timeout_s, waits=waits)
            self._channel = self._channel or cast(grpc.aio.Channel, open_channel(grpc.aio, self._coordinator, tls))
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

    def open(self, kind: "StreamKind[Sent, Received]", wait_for_ready: bool = False) -> "AsyncStream[Sent, Received]":
        def call(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamCall[Any, Any]":
            return channel.stream_stream(kind.path)(metadata=self._metadata, wait_for_ready=wait_for_ready)

        async def opened() -> "grpc.aio.StreamStreamCall[Any, Any]":
            return call(await self._live_channel(OPENED_WITHIN_S, waits=wait_for_ready))

        from lighthouse_runtime.client.streams import AsyncStream

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
