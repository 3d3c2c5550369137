"""A gRPC server as both daemons use it: handlers that raise refusals, health, reflection, options that hold.

A handler gets its request parsed, a Call, and returns a message or bytes. Whatever it raises becomes a status: a
refusal its own, anything else INTERNAL with a line in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lighthouse_runtime.address import is_own_address
from protos.errors import status_of
from protos.identity import parse_address
from protos.limits import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, REFUSAL_METADATA_KEY, TOKEN_METADATA_KEY
from protos.refusals import InvalidRequest, LighthouseError, NotPermitted

log = logging.getLogger(__name__)

# Clients ping while idle, some every 60 s: grpcio's defaults end them after 240 s ("too_many_pings"). Our own pings
# close the connections of paused and vanished callers. A misspelt option is silently ignored; a test looks at each.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
]


MAX_DETAILS_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its caller. `time_left_s` is None for a call without a deadline."""

    time_left_s: float | None
    peer: str
    metadata: Mapping[str, str]

    def require_deadline(self) -> float:
        """The time left in seconds. Raises InvalidRequest: nothing here waits without a deadline."""
        if self.time_left_s is None:
            raise InvalidRequest("missing timeout; set a deadline on the call (grpc-timeout)", field="deadline")
        return self.time_left_s

    @property
    def is_local(self) -> bool:
        """From this host: its loopback, an address of its own, or a UNIX socket."""
        kind, _, rest = self.peer.partition(":")
        if kind == "unix":
            return True
        try:
            address = parse_address(unquote(rest), "peer")
        except InvalidRequest:
            return False
        return address.is_loopback or is_own_address(address.host)


Handler = Callable[[Any, Call], Awaitable[Message | bytes]]
Observer = Callable[[str, grpc.StatusCode], None]


@dataclass(frozen=True, slots=True)
class Method:
    request: type[Message]
    handler: Handler


@dataclass(frozen=True, slots=True)
class ControlPolicy:
    """Who may end things: loopback; who has the token; anyone, if so configured."""

    token: str | None = None
    allow_remote: bool = False

    def check(self, call: Call) -> None:
        """Raises NotPermitted that names the remedies."""
        given = call.metadata.get(TOKEN_METADATA_KEY, "")
        if self.allow_remote or call.is_local:
            return
        if self.token and hmac.compare_digest(given.encode(), self.token.encode()):
            return
        raise NotPermitted(
            f"control from {call.peer} is refused: ask from the daemon's own host, give the token of its "
            "--control-token-file, or start it with --allow-remote-control"
        )


class GrpcServer:
    def __init__(
        self,
        services: Mapping[str, Mapping[str, Method]],
        reflected: Sequence[str],
        observe: Observer = lambda method, status: None,
    ) -> None:
        """`services` by full name; `reflected` are those whose descriptors the reflection service shows.

        `observe` hears of every answer.
        """
        self._server = grpc.aio.server(options=_OPTIONS)
        for name, methods in services.items():
            handlers = {method: _rpc_handler(name, method, entry, observe) for method, entry in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._names = ["", *services]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*reflected, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self, bind: str) -> int:
        """Listen on `bind`; the port. Raises InvalidRequest if that is impossible, with the reason."""
        try:
            port = self._server.add_insecure_port(bind)
        except RuntimeError as e:
            raise InvalidRequest(
                f"cannot listen on {bind}: the port is taken, or the address is not this host's; "
                "choose another (port 0 takes a free one)",
                field="--bind",
            ) from e
        await self._server.start()
        await self.set_serving(True)
        return port

    async def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new call, give those under way `grace_s`, then end them and every connection."""
        await self._server.stop(grace_s)


def _rpc_handler(service: str, name: str, method: Method, observe: Observer) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def serve(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        call = Call(context.time_remaining(), context.peer(), metadata)
        try:
            answer = await method.handler(_parse(method.request, body), call)
        except LighthouseError as e:
            observe(name, status_of(e))
            await context.abort(status_of(e), _said(e), ((REFUSAL_METADATA_KEY, type(e).__name__),))
        except asyncio.CancelledError:
            raise
        except Exception as e:  # a defect of ours must not take the daemon down
            log.exception("%s/%s failed", service, name)
            observe(name, grpc.StatusCode.INTERNAL)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(e).__name__}: {e}; see the daemon's log")
        observe(name, grpc.StatusCode.OK)
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    return grpc.unary_unary_rpc_method_handler(serve)


def _said(error: LighthouseError) -> str:
    """A status travels in a header, which has a limit; whatever a caller sent must not break it."""
    text = str(error)
    return text if len(text) <= MAX_DETAILS_CHARS else text[: MAX_DETAILS_CHARS - 3] + "..."


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.FromString(body)
    except DecodeError as e:
        raise InvalidRequest(f"{len(body)} bytes are no {kind.DESCRIPTOR.full_name}", field="request") from e
