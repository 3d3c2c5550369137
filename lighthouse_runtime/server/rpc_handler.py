"""One RPC as a server runs it: parse, call the handler, and make a status of whatever it raises.

A handler gets its request parsed and a Call, and returns a message or bytes; that of a stream gets a Sender, too, and
returns when the stream has ended. A refusal becomes its own status, anything else INTERNAL with a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import REFUSAL_METADATA_KEY, cut_reason
from lighthouse_protocol.refusals import InternalError, InvalidRequest, LighthouseError, Unreachable
from lighthouse_protocol.wire import streams
from lighthouse_protocol.wire.status_codes import status_of
from lighthouse_runtime.net.own_address import is_own_address
from lighthouse_runtime.server.streams import Requests, Sender

log = logging.getLogger(__name__)

T = TypeVar("T")


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
StreamHandler = Callable[[Requests[Any], Call, Sender], Awaitable[None]]
Observer = Callable[[str, grpc.StatusCode], None]


@dataclass(frozen=True, slots=True)
class Method:
    request: type[Message]
    handler: Handler


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages both ways. The handler's iteration over the requests ends with the stream."""

    requests: streams.Stream[Any]
    handler: StreamHandler


Entry = Method | Stream
_Context = grpc.aio.ServicerContext[Any, Any]


class Serving:
    """All calls and streams of a server. `observe` hears of every answer, and of the end of every stream but a loss."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._open_streams: set[Sender] = set()
        self._is_closed = False

    def rpc_handler(self, service: str, name: str, entry: Entry) -> grpc.RpcMethodHandler[Any, Any]:
        path = f"{service}/{name}"
        match entry:
            case Method(request, handler):
                return grpc.unary_unary_rpc_method_handler(self._answering(path, request, handler))
            case Stream(requests, stream_handler):

                def stream(_: object, call: Call, sender: Sender) -> Awaitable[None]:
                    def read(body: bytes) -> Any:
                        return requests.read(_parse(requests.schema, body))

                    return stream_handler(Requests(sender, read), call, sender)

                return grpc.stream_stream_rpc_method_handler(self._streaming(path, stream))

    def end_streams(self, why: str) -> None:
        """Each is told, after what is on its way to it; no new one is opened."""
        self._is_closed = True
        for sender in tuple(self._open_streams):
            sender.end(Unreachable(why))

    def _answering(
        self, path: str, request: type[Message], handler: Handler
    ) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def serve(body: bytes, context: _Context) -> bytes:
            try:
                answer = await _refusing(path, lambda: handler(_parse(request, body), _call(context)))
            except LighthouseError as e:
                await self._refuse(path, context, e)
            self._told(path, grpc.StatusCode.OK)
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return serve

    def _streaming(
        self, path: str, handler: Callable[[Any, Call, Sender], Awaitable[None]]
    ) -> Callable[[Any, _Context], Awaitable[None]]:
        async def serve(first: Any, context: _Context) -> None:
            try:
                if self._is_closed:
                    raise Unreachable("the server is stopping")
                async with self._open(context) as sender:
                    await _refusing(path, lambda: handler(first, _call(context), sender))
            except LighthouseError as e:
                await self._refuse(path, context, e)
            self._told(path, grpc.StatusCode.OK)

        return serve

    @contextlib.asynccontextmanager
    async def _open(self, context: _Context) -> AsyncGenerator[Sender, None]:
        sender = Sender(context)
        self._open_streams.add(sender)
        try:
            yield sender
        except asyncio.CancelledError:
            sender.break_off()
            raise
        finally:
            self._open_streams.discard(sender)
            await sender.finish()
        if sender.error is not None:
            raise sender.error

    async def _refuse(self, path: str, context: _Context, error: LighthouseError) -> NoReturn:
        self._told(path, status_of(error))
        kind = (REFUSAL_METADATA_KEY, type(error).__name__)
        try:
            await context.abort(status_of(error), cut_reason(str(error)), (kind,))
        except grpc.aio.InternalError:  # the caller has gone meanwhile
            raise asyncio.CancelledError from None

    def _told(self, path: str, status: grpc.StatusCode) -> None:
        self._observe(path.rpartition("/")[2], status)


async def _refusing(path: str, work: Callable[[], Awaitable[T]]) -> T:
    """A defect of ours must not take the daemon down, and is a refusal to its caller."""
    try:
        return await work()
    except LighthouseError:
        raise
    except Exception as e:
        log.exception("%s failed", path)
        raise InternalError(f"{type(e).__name__}: {e}; see the daemon's log") from e


def _call(context: _Context) -> Call:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Call(context.time_remaining(), context.peer(), metadata)


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.FromString(body)
    except DecodeError as e:
        raise InvalidRequest(f"{len(body)} bytes are no {kind.DESCRIPTOR.full_name}", field="request") from e
