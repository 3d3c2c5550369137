"""The client's side of open streams: with the lighthouse a manager's session, a rank of a run, a supervisor; with the
manager a rank's watch.

Iterating gives what the other side says, and ends where it ended the stream well; however else the stream ends, a
refusal says why. There are no pings: a session is judged by its heartbeats' answers, a watch by its connection.
"""

import asyncio
import math
import os
import queue
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.refusals import InternalError, LighthouseError, LimitReached, Unreachable
from lighthouse_runtime.client.channel import refusal
from lighthouse_runtime.net.outbox import Outbox

if TYPE_CHECKING:
    from lighthouse_protocol.wire.streams import Stream


M = TypeVar("M")
S = TypeVar("S")

_REPEATED = b""  # in the outbox: no message is empty


Meaning = Callable[[grpc.RpcError, str, float], LighthouseError]


@dataclass(frozen=True, slots=True)
class StreamKind(Generic[S, M]):
    path: str
    requests: "Stream[S]"
    responses: "Stream[M]"

    def write(self, message: S) -> bytes:
        return self.requests.write(message).SerializeToString()

    def read(self, body: bytes) -> M | None:
        """None for a message of a newer peer, which is skipped."""
        schema = self.responses.schema
        try:
            parsed = schema.FromString(body)
        except DecodeError as e:
            raise InternalError(f"was sent {len(body)} bytes that are no {schema.DESCRIPTOR.full_name}") from e
        return self.responses.read(parsed)


class AsyncStream(Generic[S, M]):
    """An async context manager, whose end gives the stream up, and an async iterator with one reader."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, Any] | Coroutine[Any, Any, grpc.aio.StreamStreamCall[Any, Any]]",
        address: str,
        kind: StreamKind[S, M],
        meaning: Meaning = refusal,
    ) -> None:
        """`call`: the open one, or what opens it; that may raise a refusal, which the reader gets. `meaning`: of how
        gRPC ends the stream."""
        self._meaning = meaning
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
        """Queue it, without waiting. After the end nothing happens. Raises LimitReached for one that is too big."""
        body = self._kind.write(message)
        if len(body) > MAX_REQUEST_BYTES:
            raise LimitReached(f"{type(message).__name__} has {len(body)} bytes; at most {MAX_REQUEST_BYTES} are taken")
        if not self._outbox.put(body):
            self.cancel(Unreachable(f"{self.address} does not read its messages"))

    def end(self) -> None:
        """Say no more; what is queued is sent. The other side then ends the stream."""
        self._outbox.close()

    def cancel(self, error: LighthouseError | None = None) -> None:
        """Give the stream up: the iteration raises `error`, or ends without one. The first cancel counts."""
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
        """Raises what opening has raised; CancelledError after cancel()."""
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
                self._error = self._meaning(e, self.address, math.inf)
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
        """Not by the call's write(): where the peer has ended the stream that puts an error of its own in place of the
        peer's status, and the reason is lost."""
        await self._call.wait_for_connection()
        core = getattr(self._call, "_cython_call", None)  # not grpc.aio's promise
        await (self._call.write(body) if core is None else core.send_serialized_message(body))

    async def _write(self) -> None:
        try:
            await self._opened()
            await self._outbox.run()
            await self._call.done_writing()
        except (LighthouseError, grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            self._outbox.clear()  # the stream has ended; its reader learns why


class SyncStream(Generic[S, M]):
    """A context manager and an iterator that blocks, for one reader. send() and cancel() are for any thread.

    A fork does it no harm; what the child may do: client/forks.py.
    """

    def __init__(
        self,
        open_: Callable[[Iterator[bytes]], Any],
        address: str,
        kind: StreamKind[S, M],
        meaning: Meaning = refusal,
    ) -> None:
        """`open_` opens the stream, given what is sent on it; a refusal that it raises is the reader's. `meaning` as in
        AsyncStream."""
        self._meaning = meaning
        self.address = address
        self._kind = kind
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_cancelled = False
        self._pid = os.getpid()
        self._repeated: tuple[Callable[[], S | None], float] | None = None
        self._error: LighthouseError | None = None
        self._failed: Callable[[LighthouseError], None] = lambda error: None
        self._call: Any = None
        try:
            self._call = open_(self._messages())
        except LighthouseError as e:
            self._error = e
            return
        # gRPC takes what is sent on a thread of its own: whichever side ends the stream, that thread ends with it.
        if not self._call.add_callback(self._send_no_more):
            self._send_no_more()

    def on_failure(self, failed: Callable[[LighthouseError], None]) -> None:
        """`failed` hears with what error it ends, before its reader does; in the reader's thread."""
        self._failed = failed

    def send(self, message: S) -> None:
        """Queue it, without waiting. After the end nothing happens."""
        self._outbox.put(self._kind.write(message))

    def repeat(self, say: Callable[[], S | None], every_s: float) -> None:
        """Send what `say` gives, now and every so often, from gRPC's own thread; None: nothing this time. It must not
        raise: that would end the stream."""
        self._repeated = (say, every_s)
        self.repeat_now()

    def repeat_now(self) -> None:
        """What is repeated is sent before all that is sent after this; nothing, if nothing is repeated."""
        self._outbox.put(_REPEATED)

    def _messages(self) -> Iterator[bytes]:
        """What is to be sent, until the end."""
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
                say, every_s = self._repeated
                due_at = time.monotonic() + every_s
                if (message := say()) is not None:
                    yield self._kind.write(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Give the stream up; the iteration ends without an error. In a forked child it is not ours to end."""
        if self._pid == os.getpid():
            self._is_cancelled = True
            if self._call is not None:
                self._call.cancel()

    def end(self) -> None:
        """Say no more; what is queued is sent. The other side then ends the stream."""
        self._outbox.put(None)

    def _send_no_more(self) -> None:
        self._outbox.put(None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> M:
        while True:
            if self._error is not None:
                if self._is_cancelled:
                    raise StopIteration
                self._failed(self._error)
                raise self._error
            try:
                body = next(self._call)
            except grpc.RpcError as e:
                if self._is_cancelled:
                    raise StopIteration from None
                error = self._meaning(e, self.address, math.inf)
                self._failed(error)
                raise error from None
            if (message := self._kind.read(body)) is not None:
                return message
