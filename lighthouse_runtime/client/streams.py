"""Client side of streams: a manager's session, the streams of a run's ranks and supervisors, and a rank's watch.

Iterating over a stream yields the messages from the server. The iteration stops if the server closes the stream
normally, and otherwise raises a LighthouseError. There are no pings: a session is alive if its heartbeats are answered,
and a watch while its connection is open.

Most commands open no stream and importing this module is slow, so the clients import it when they open one.
"""

import asyncio
import math
import os
import queue
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.hosts import FromHost, ToHost
from lighthouse_protocol.messages.run import FromRunRank, FromSupervisor, ToRunRank, ToSupervisor
from lighthouse_protocol.messages.session import FromRank, ToLighthouse, ToManager, ToRank
from lighthouse_protocol.refusals import InternalError, LighthouseError, LimitReached, Unreachable
from lighthouse_protocol.wire import streams
from lighthouse_runtime.client.rpcs import LIGHTHOUSE, MANAGER
from lighthouse_runtime.net.outbox import Outbox

M = TypeVar("M")
S = TypeVar("S")

_REPEATED = b""  # a marker in the outbox, since no message is empty


ErrorMapper = Callable[[grpc.RpcError, str, float], LighthouseError]


@dataclass(frozen=True, slots=True)
class StreamKind(Generic[S, M]):
    path: str
    requests: streams.Stream[S]
    responses: streams.Stream[M]

    def write(self, message: S) -> bytes:
        return self.requests.write(message).SerializeToString()

    def read(self, body: bytes) -> M | None:
        """Parse a message. Return None for an unknown message type, which readers skip."""
        schema = self.responses.schema
        try:
            parsed = schema.FromString(body)
        except DecodeError as e:
            raise InternalError(f"cannot parse {len(body)} bytes as {schema.DESCRIPTOR.full_name}") from e
        return self.responses.read(parsed)


class AsyncStream(Generic[S, M]):
    """Bidirectional gRPC stream for asyncio. Only one task may read it. Leaving its `async with` block cancels it."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, Any] | Coroutine[Any, Any, grpc.aio.StreamStreamCall[Any, Any]]",
        address: str,
        kind: StreamKind[S, M],
        map_error: ErrorMapper,
    ) -> None:
        """Start the task that writes queued messages.

        `call` is an open gRPC call, or a coroutine that opens one. If the coroutine raises a LighthouseError, the
        reader of the stream gets it.
        """
        self._map_error = map_error
        self.address = address
        self._call: Any = None
        self._opening: asyncio.Task[None] | None = None
        if isinstance(call, Coroutine):
            self._opening = asyncio.create_task(self._open(call))
        else:
            self._call = call
        self._kind = kind
        self._is_cancelled = False
        self._error: LighthouseError | None = None
        self._outbox = Outbox(self._write_one)
        self._writer = asyncio.create_task(self._write())

    @property
    def is_open(self) -> bool:
        if self._call is not None:
            return not self._call.done()
        return self._opening is not None and not self._opening.done()

    def send(self, message: S) -> None:
        """Queue a message without blocking. Do nothing on a closed stream.

        Raises:
            LimitReached: The message is larger than MAX_REQUEST_BYTES.
        """
        body = self._kind.write(message)
        if len(body) > MAX_REQUEST_BYTES:
            raise LimitReached(f"{type(message).__name__} has {len(body)} bytes; at most {MAX_REQUEST_BYTES} are taken")
        if not self._outbox.put(body):
            self.cancel(Unreachable(f"{self.address} does not read its messages"))

    def end(self) -> None:
        """Send queued messages, then close the sending side. The server then closes the stream."""
        self._outbox.close()

    def cancel(self, error: LighthouseError | None = None) -> None:
        """Cancel the stream. The iteration raises `error` if given, or else stops. Later calls do nothing."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._error = self._error or error
            if self._opening is not None:
                self._opening.cancel()
            if self._call is not None:
                self._call.cancel()
        self._outbox.clear()
        self._writer.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()
        await asyncio.wait((self._writer,))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        while True:
            message = self._kind.read(await self._next())
            if message is not None:
                return message

    async def _open(self, call: "Coroutine[Any, Any, Any]") -> None:
        self._call = await call

    async def _opened(self) -> None:
        """Wait until the call is open. Raise its error if opening fails, or CancelledError after cancel()."""
        if self._opening is not None and self._call is None:
            await asyncio.wait((self._opening,))
            self._opening.result()

    async def _next(self) -> bytes:
        try:
            await self._opened()
            body = None if self._is_cancelled else await self._call.read()
            if isinstance(body, bytes) and not self._is_cancelled:
                return body
        except grpc.RpcError as e:
            if not self._is_cancelled:
                self._error = self._map_error(e, self.address, math.inf)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_cancelled or (task is not None and task.cancelling()):
                raise
        except LighthouseError as e:
            if not self._is_cancelled:
                self._error = e
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def _write_one(self, body: bytes) -> None:
        # The call's own write() would replace the status of a peer that has ended the stream, and hide the reason.
        await self._call.wait_for_connection()
        core = getattr(self._call, "_cython_call", None)  # not part of grpc.aio's public interface
        await (self._call.write(body) if core is None else core.send_serialized_message(body))

    async def _write(self) -> None:
        try:
            await self._opened()
            await self._outbox.run()
            await self._call.done_writing()
        except (LighthouseError, grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            self._outbox.clear()  # the stream has ended; its reader gets the reason


class SyncStream(Generic[S, M]):
    """A blocking stream: an iterator for a single reader, and a context manager. Any thread may send or cancel.

    Forking the process does not affect the stream. See client/connection.py for the use of gRPC in a forked child.
    """

    def __init__(
        self,
        open_: Callable[[Iterator[bytes]], Any],
        address: str,
        kind: StreamKind[S, M],
        map_error: ErrorMapper,
    ) -> None:
        """Open the stream.

        Args:
            open_: Opens the call, given an iterator over the messages to send. If it raises a LighthouseError, the
                iteration raises it.
            address: Address of the server, for errors.
            kind: Path and message types of the stream.
            map_error: Converts the gRPC error of a failed stream.
        """
        self._map_error = map_error
        self.address = address
        self._kind = kind
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_cancelled = False
        self._pid = os.getpid()
        self._repeated: tuple[Callable[[], S | None], float] | None = None
        self._error: LighthouseError | None = None
        self._on_failure: Callable[[LighthouseError], None] = lambda error: None
        self._call: Any = None
        try:
            self._call = open_(self._messages())
        except LighthouseError as e:
            self._error = e
            return
        # gRPC reads the messages on a thread, which must stop when the stream closes, whichever side closes it.
        if not self._call.add_callback(self.end):
            self.end()

    def on_failure(self, failed: Callable[[LighthouseError], None]) -> None:
        """Call `failed` with the error if the stream fails, before the iteration raises the error."""
        self._on_failure = failed

    def send(self, message: S) -> None:
        """Queue a message without blocking. Do nothing on a closed stream."""
        self._outbox.put(self._kind.write(message))

    def repeat(self, make: Callable[[], S | None], every_s: float) -> None:
        """Call `make` now and every `every_s` seconds, and send the message that it returns, unless that is None.

        `make` runs on gRPC's thread. It must not raise, because an exception would close the stream.
        """
        self._repeated = (make, every_s)
        self.repeat_now()

    def repeat_now(self) -> None:
        """Send repeat()'s message now instead of after its interval. Do nothing if repeat() was not called."""
        self._outbox.put(_REPEATED)

    def _messages(self) -> Iterator[bytes]:
        """Yield queued and repeated messages until the sending side is closed."""
        due_at = 0.0
        while True:
            try:
                body = self._outbox.get(timeout=self._repeated and max(0.0, due_at - time.monotonic()))
            except queue.Empty:
                body = _REPEATED
            if body is None:
                return
            if body != _REPEATED:
                yield body
            elif self._repeated is not None:
                make, every_s = self._repeated
                due_at = time.monotonic() + every_s
                if (message := make()) is not None:
                    yield self._kind.write(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the stream. The iteration stops without an error. Do nothing in a forked child."""
        if self._pid == os.getpid():
            self._is_cancelled = True
            if self._call is not None:
                self._call.cancel()

    def end(self) -> None:
        """Send queued messages, then close the sending side. The server then closes the stream."""
        self._outbox.put(None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> M:
        while True:
            if self._error is not None:
                if self._is_cancelled:
                    raise StopIteration
                self._on_failure(self._error)
                raise self._error
            try:
                body = next(self._call)
            except grpc.RpcError as e:
                if self._is_cancelled:
                    raise StopIteration from None
                error = self._map_error(e, self.address, math.inf)
                self._on_failure(error)
                raise error from None
            if (message := self._kind.read(body)) is not None:
                return message


SESSION = StreamKind(LIGHTHOUSE + "Session", streams.SESSION_REQUESTS, streams.SESSION_RESPONSES)
RANK = StreamKind(LIGHTHOUSE + "Rank", streams.RANK_REQUESTS, streams.RANK_RESPONSES)
SUPERVISE = StreamKind(LIGHTHOUSE + "Supervise", streams.SUPERVISOR_REQUESTS, streams.SUPERVISOR_RESPONSES)
WATCH = StreamKind(MANAGER + "Watch", streams.WATCH_REQUESTS, streams.WATCH_RESPONSES)
NODE = StreamKind(MANAGER + "Node", streams.NODE_REQUESTS, streams.NODE_RESPONSES)

Session = AsyncStream[ToLighthouse, ToManager]
AsyncRankStream = AsyncStream[FromRunRank, ToRunRank]
SupervisorStream = AsyncStream[FromSupervisor, ToSupervisor]
HostStream = AsyncStream[FromHost, ToHost]
Watch = SyncStream[FromRank, ToRank]
RankStream = SyncStream[FromRunRank, ToRunRank]
