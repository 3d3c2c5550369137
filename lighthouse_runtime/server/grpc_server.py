"""The gRPC server of the lighthouse and the manager.

It executes RPCs: limits per peer, access control, parsing, the handler, and the response's status. A handler receives a
parsed request and a Call, and returns a message or bytes. A stream's handler also receives a Sender, and returns when
the stream has closed. A LighthouseError determines the gRPC status (wire/codec.py). Any other exception is logged and
becomes INTERNAL. The server also has health checks, reflection and graceful shutdown.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lighthouse_protocol.limits import (
    JOB_METADATA_KEY,
    KEEPALIVE_S,
    LEADER_METADATA_KEY,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    REFUSAL_METADATA_KEY,
    RUN_METADATA_KEY,
    cut_reason,
)
from lighthouse_protocol.refusals import (
    InternalError,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotLeader,
    NotPermitted,
    Unreachable,
)
from lighthouse_protocol.rules.access import NOBODY, Principal, is_mutating, method_name, needed
from lighthouse_protocol.rules.rate_limits import Peer, PeerLimits, PeerTable, Resource, StreamMeter
from lighthouse_protocol.wire import streams
from lighthouse_protocol.wire.codec import status_of
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import is_port_taken, resolves, split_bind
from lighthouse_runtime.net.outbox import MAX_BYTES_TO_ALL, WriteGate
from lighthouse_runtime.process.children import describe_listener
from lighthouse_runtime.security.access import Access, Caller, admit, format_peer, is_local, names_in_certificate
from lighthouse_runtime.server.streams import OutputGate, Requests, Sender
from lighthouse_runtime.timing.pacing import SparseLog

log = logging.getLogger(__name__)


# Peers and their limits (lighthouse_protocol/rules/rate_limits.py). Refusals are logged at a bounded rate.

IPV6_PREFIX = 64  # one host or site usually owns a whole network of this size


@dataclass(slots=True)
class _Gate:
    semaphore: asyncio.Semaphore
    users: int = 0


class Peers:
    """Enforces a server's limits per peer. Not thread-safe: use it on the event loop only."""

    def __init__(self, limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self._table = PeerTable(self.limits)
        self._writes_to_all = WriteGate(MAX_BYTES_TO_ALL)
        self._writes: WeakKeyDictionary[Peer, WriteGate] = WeakKeyDictionary()
        self._gates: dict[str, _Gate] = {}
        self._refusals = SparseLog(log, "caller_refused")

    def enter(self, address: str) -> Peer:
        """Count a call or stream as open until Peer.leave(). Raise LimitReached if the peer has too many."""
        peer = self._table.get(peer_name(address), _now())
        peer.enter()
        return peer

    def log_refusal(self, refusal: LimitReached) -> None:
        self._refusals.warning("refused: %s", refusal)

    def stream_limits(self, peer: Peer) -> tuple[StreamMeter, WriteGate]:
        """Return a new stream's limits: the meter of messages from the peer, and the gate for large messages to it."""
        gate = self._writes.get(peer)
        if gate is None:
            gate = self._writes[peer] = WriteGate(parent=self._writes_to_all)
        return StreamMeter(peer, self.limits), gate

    def charge(self, address: str, resource: Resource, amount: float = 1.0) -> None:
        """Use up `amount` of a peer's allowance of `resource`. Raise LimitReached if less is left."""
        now = _now()
        self._table.get(peer_name(address), now).charge(resource, now, amount)

    def try_charge(self, address: str, resource: Resource, amount: float = 1.0) -> bool:
        """Use up `amount` of a peer's allowance of `resource` and return True, or return False if less is left."""
        now = _now()
        return self._table.get(peer_name(address), now).try_charge(resource, now, amount)

    @asynccontextmanager
    async def expensive_read(self, address: str) -> AsyncGenerator[None]:
        """Limit each peer to `limits.reads` expensive responses at a time. Other calls wait to enter this context."""
        name = peer_name(address)
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = _Gate(asyncio.Semaphore(self.limits.reads))
        gate.users += 1
        try:
            async with gate.semaphore:
                yield
        finally:
            gate.users -= 1
            if gate.users == 0:
                del self._gates[name]


@functools.lru_cache(maxsize=4096)
def _host_name(host: str) -> str:
    try:
        address = ipaddress.ip_address(unquote(host).strip("[]"))
    except ValueError:
        return host or "a local process"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
    return str(address)


def peer_name(address: str) -> str:
    """Return the peer to which a connection belongs: an IPv4 address, an IPv6 /64 network, or "a local process".

    `address` is in gRPC's form, such as ipv4:10.0.0.1:4711.
    """
    kind, _, rest = address.partition(":")
    return _host_name(rest.rpartition(":")[0]) if kind.startswith("ip") else "a local process"


def _now() -> float:
    return asyncio.get_running_loop().time()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Context of a call, for its handler. The caller is authorized to use the method (rules/access.py)."""

    time_left_s: float | None  # None without a deadline
    peer: str  # address in gRPC's form
    metadata: Mapping[str, str]
    principal: Principal = NOBODY

    @property
    def caller(self) -> str:
        """The caller's address as host:port."""
        return format_peer(self.peer)

    def require_deadline(self) -> float:
        """Return the seconds left until the deadline. Raise InvalidRequest if the call has no deadline."""
        if self.time_left_s is None:
            raise InvalidRequest("no deadline; set one on the call (grpc-timeout)", field="deadline")
        return self.time_left_s

    @property
    def is_local(self) -> bool:
        return is_local(self.peer)


Handler = Callable[[Any, Call], Awaitable[Message | bytes]]
StreamHandler = Callable[[Requests[Any], Call, Sender], Awaitable[None]]
Observer = Callable[[str, grpc.StatusCode], None]


@dataclass(frozen=True, slots=True)
class Method:
    request: type[Message]
    handler: Handler


@dataclass(frozen=True, slots=True)
class Stream:
    """A bidirectional streaming method: the codec of its requests, and its handler."""

    requests: streams.Stream[Any]
    handler: StreamHandler
    # Called with each request before it is converted, to drop parts that would exceed a limit.
    lighten: Callable[[Any, Call], None] = lambda request, call: None


Entry = Method | Stream
_Context = grpc.aio.ServicerContext[Any, Any]


# grpcio queues a call before any of our code sees it, and cancels queued calls of all clients at random when 1,000 are
# waiting. A call that its client has reset stays in the queue and counts here, so one connection cannot fill the queue.
# Our own processes use one connection and fewer than ten streams; RFC 9113 advises against a limit below 100.
MAX_STREAMS_PER_CONNECTION = 100

# Idle clients ping, some every 60 s. grpcio's defaults close their connections after 240 s ("too_many_pings").
# grpcio ignores a misspelt option silently, so a test checks each.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),  # it sends a ping with nearly every message, a third of a heartbeat's cost
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),  # gRPC's default is 120 s
    ("grpc.max_connection_idle_ms", 300_000),  # without calls; the client reconnects for its next call
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
]


MAX_INT = 2**31 - 1  # of gRPC's options; as milliseconds, 24 days


def options(keepalive_s: float) -> list[tuple[str, int]]:
    half_ms = min(round(1000 * keepalive_s / 2), MAX_INT)
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [*_OPTIONS, *((name, half_ms) for name in names)]


class GrpcServer:
    """The server and its open streams.

    The server parses a request only if `access` admits the caller, `gate` accepts calls, and the peer is below the
    limits of `peers`.
    """

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Entry]],
        reflected: Sequence[str],
        access: Access,
        observe: Observer = lambda method, status: None,
        peers: Peers | None = None,
        gate: OutputGate | None = None,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Register the services. Raise KeyError for a method that rules/access.py does not list.

        Args:
            services: Methods by full service name.
            reflected: Services that gRPC reflection lists.
            access: Authorizes callers. Health checks and reflection are open to all.
            observe: Called with the method and status of each answered call, and of each stream unless its
                connection broke.
            peers: Limits per peer, or None for no limits.
            gate: Holds back responses until earlier records of the journal are durable. Health checks and reflection
                bypass it.
            keepalive_s: Seconds after which an unresponsive connection is closed.
        """
        self._server = grpc.aio.server(options=options(keepalive_s))
        self._observe = observe
        self._access = access
        self._gate = gate or OutputGate()
        self._peers = peers
        self._open_streams: set[Sender] = set()
        self._is_closed = False
        for name, methods in services.items():
            handlers = {method: self._rpc_handler(f"{name}/{method}", entry) for method, entry in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._names = ["", *services]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*reflected, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self, bind: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `bind` (HOST:PORT), with TLS if `credentials` are given.

        Returns:
            The port in use.

        Raises:
            InvalidRequest: The server cannot listen on `bind`.
        """
        host, number = split_bind(bind, "--bind")
        if is_port_taken(host, number):  # gRPC would print a line of its own
            why = f"the port is in use by {describe_listener(number)}; choose another (port 0 takes a free one)"
            raise InvalidRequest(f"cannot listen on {bind}: {why}", field="--bind")
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as e:
            why = "the port is taken, or the address is not this host's; choose another (port 0 takes a free one)"
            if not resolves(host):
                why = "this host name does not resolve here; give an address of this host, or [::]:PORT for all"
            raise InvalidRequest(f"cannot listen on {bind}: {why}", field="--bind") from e
        await self._server.start()
        await self.set_serving(self._gate.is_open)
        return port

    async def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    def break_streams(self, error: LighthouseError) -> None:
        """Discard queued messages and close all streams with the status of `error`. New streams are still accepted."""
        for sender in tuple(self._open_streams):
            sender.abort(error)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, close all streams, and give running calls `grace_s` seconds to finish."""
        self._is_closed = True
        for sender in tuple(self._open_streams):
            error = Unreachable("the server is stopping")
            sender.end(error) if self._gate.is_open else sender.abort(error)
        await self._server.stop(grace_s)

    def _rpc_handler(self, path: str, entry: Entry) -> grpc.RpcMethodHandler[Any, Any]:
        needed(f"/{path}")
        match entry:
            case Method(request, handler):
                return grpc.unary_unary_rpc_method_handler(self._answering(path, request, handler))
            case Stream(requests, stream_handler, lighten):

                def stream(_: object, call: Call, sender: Sender) -> Awaitable[None]:
                    def read(body: bytes) -> Any:
                        request = _parse(requests.schema, body)
                        lighten(request, call)
                        return requests.read(request)

                    return stream_handler(Requests(sender, read), call, sender)

                return grpc.stream_stream_rpc_method_handler(self._streaming(path, stream))

    def _answering(
        self, path: str, request: type[Message], handler: Handler
    ) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def serve(body: bytes, context: _Context) -> bytes:
            async with self._admitted(path, context) as (call, peer):
                if peer is not None:
                    peer.charge(Resource.BYTES, _now(), len(body))
                answer = await _refusing(path, lambda: self._answer(path, _parse(request, body), call, handler))
                await self._gate.wait_delivered()
                return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return serve

    async def _answer(self, path: str, request: Message, call: Call, handler: Handler) -> Message | bytes:
        if not is_mutating(f"/{path}"):
            return await handler(request, call)
        what, target = method_name(f"/{path}"), _target(request, call)
        with self._access.audit.action(call.principal, call.caller, what, target):
            return await handler(request, call)

    def _streaming(
        self, path: str, handler: Callable[[Any, Call, Sender], Awaitable[None]]
    ) -> Callable[[Any, _Context], Awaitable[None]]:
        async def serve(first: Any, context: _Context) -> None:
            async with self._admitted(path, context) as (call, peer), self._open(context, peer) as sender:
                await _refusing(path, lambda: handler(first, call, sender))

        return serve

    @asynccontextmanager
    async def _admitted(self, path: str, context: _Context) -> AsyncGenerator[tuple[Call, Peer | None]]:
        """Authorize the caller and count the call as open. A LighthouseError inside the `with` block ends the call."""
        peer = None
        try:
            if self._is_closed:
                raise Unreachable("the server is stopping")
            call = self._permitted(path, context)
            self._gate.check()
            if self._peers is not None:
                peer = self._peers.enter(call.peer)
            yield call, peer
        except LighthouseError as e:
            # While the gate refuses calls, authorized callers receive its error instead.
            await self._refuse(path, context, e if isinstance(e, NotPermitted) else self._gate.refusal() or e)
        finally:
            if peer is not None:
                peer.leave()
        self._observe_status(path, grpc.StatusCode.OK)

    def _permitted(self, path: str, context: _Context) -> Call:
        """Authorize the caller and return the call's context. Raise NotPermitted if this fails."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        peer = unquote(context.peer())
        principal = admit(self._access, f"/{path}", Caller(peer, metadata, lambda: _names(context)))
        return Call(context.time_remaining(), peer, metadata, principal)

    @asynccontextmanager
    async def _open(self, context: _Context, peer: Peer | None) -> AsyncGenerator[Sender, None]:
        try:
            # Otherwise grpc.aio sends the metadata with the first message. Closing the stream meanwhile would send it
            # again with the status (TOO_MANY_OPERATIONS), and the peer would not notice that the stream has closed.
            await context.send_initial_metadata(())
        except grpc.aio.BaseError:  # the caller has disconnected
            raise asyncio.CancelledError from None
        limits = self._peers.stream_limits(peer) if self._peers is not None and peer is not None else (None, None)
        sender = Sender(context, *limits, output=self._gate)
        self._open_streams.add(sender)
        try:
            yield sender
        except asyncio.CancelledError:
            sender.mark_broken()
            raise
        finally:
            self._open_streams.discard(sender)
            await sender.finish()
        if sender.error is not None:
            raise sender.error

    async def _refuse(self, path: str, context: _Context, error: LighthouseError) -> NoReturn:
        self._observe_status(path, status_of(error))
        if self._peers is not None and isinstance(error, LimitReached):
            self._peers.log_refusal(error)
        metadata = [(REFUSAL_METADATA_KEY, type(error).__name__)]
        if isinstance(error, NotLeader) and error.leader:
            metadata.append((LEADER_METADATA_KEY, error.leader))
        try:
            await context.abort(status_of(error), cut_reason(str(error)), tuple(metadata))
        except grpc.aio.InternalError:  # the caller has disconnected
            raise asyncio.CancelledError from None

    def _observe_status(self, path: str, status: grpc.StatusCode) -> None:
        self._observe(path.rpartition("/")[2], status)


def _names(context: _Context) -> tuple[str, ...]:
    """Return the names in the verified client certificate, or an empty tuple without a certificate."""
    found: Mapping[str, Iterable[bytes]] = context.auth_context()

    def decode(kind: str) -> Iterable[str]:
        return (name.decode(errors="replace") for name in found.get(kind, ()))

    return names_in_certificate(decode("peer_spiffe_id"), decode("peer_dns"))


async def _refusing(path: str, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`. Log any exception other than LighthouseError, and raise InternalError instead.

    `path` names the RPC in the log.
    """
    try:
        return await work()
    except LighthouseError:
        raise
    except Exception as e:
        log.exception("%s failed", path, extra=event("rpc_failed", rpc=path))
        raise InternalError(f"{type(e).__name__}: {e}; see the daemon's log") from e


def _target(request: Message, call: Call) -> str:
    """Describe the target of a control call for the audit log: the job, the run and the request's text fields."""
    target = {key: call.metadata[key] for key in (JOB_METADATA_KEY, RUN_METADATA_KEY) if key in call.metadata}
    target |= {field.name: value for field, value in request.ListFields() if isinstance(value, str)}
    return ", ".join(f"{name}={value}" for name, value in target.items())


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.FromString(body)
    except DecodeError as e:
        raise InvalidRequest(f"cannot parse {len(body)} bytes as {kind.DESCRIPTOR.full_name}", field="request") from e


# Replies of handlers that wait on the event loop.


class FutureReply(Generic[T]):
    """Implementation of lighthouse_runtime.ports.Reply. Awaiting `value` returns the answer or raises the refusal."""

    def __init__(self) -> None:
        self.value: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def answer(self, value: T) -> None:
        if not self.value.done():
            self.value.set_result(value)

    def refuse(self, error: LighthouseError) -> None:
        if not self.value.done():
            self.value.set_exception(error)
            self.value.exception()  # marks it as retrieved, since the caller may have disconnected
