"""Server side of open streams: sending, receiving, and holding back output until earlier records are durable.

If a peer disconnects, grpc.aio cancels the handler; if a peer is killed, its requests just stop. In both cases, and if
this server closes the stream, the iteration over the requests ends normally. `Sender.ending` then has the reason.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

import grpc.aio
from google.protobuf.message import Message

from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, LimitReached
from lighthouse_protocol.rules.rate_limits import StreamMeter
from lighthouse_runtime.net.outbox import (
    LARGE_WRITTEN_WITHIN_S,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_MESSAGES,
    Body,
    Outbox,
    WriteGate,
)

# Output gate: keeps messages in order behind records that are not durable yet.
#
# A record takes time to reach the store, while the server continues. Output after the record waits here until the store
# has acknowledged it, so peers see a server that is merely slow. If the server does not lead, it must send nothing, and
# all calls are refused.


class _Hold:
    """Queue entry that blocks all later entries until it is released."""

    def __init__(self) -> None:
        self.is_released = False


class OutputGate:
    """Queue that holds back output until the records written before it are durable in the store."""

    def __init__(self, refusal: Callable[[], LighthouseError | None] = lambda: None) -> None:
        """Create an empty queue.

        `refusal` returns the error with which the server must refuse all calls now, or None if it may answer them.
        While it returns an error, no output is sent.
        """
        self.refusal = refusal
        self._queue: deque[Callable[[], None] | _Hold] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_open(self) -> bool:
        """True if the server may answer calls now."""
        return self.refusal() is None

    def check(self) -> None:
        """Raise the error that refusal() returns, if any."""
        if (refusal := self.refusal()) is not None:
            raise refusal

    def hold(self) -> Callable[[], None]:
        """Hold back all later output until the returned function is called."""
        hold = _Hold()
        self._queue.append(hold)

        def release() -> None:
            hold.is_released = True
            self._drain()

        return release

    def deliver(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the holds from earlier calls to hold() are released, or at once if there are none.

        `callback` is never called if drop() clears the queue first, or if refusal() returns an error by then.
        """
        if self._queue:
            self._queue.append(callback)
        elif self.refusal() is None:
            callback()

    async def wait_delivered(self) -> None:
        """Wait until the holds from earlier calls to hold() are released.

        Raise the error passed to drop() if that is called meanwhile, or else the error that refusal() returns, if any.
        """
        if self._queue:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)

            def deliver() -> None:
                if not future.done():
                    future.set_result(None)

            self._queue.append(deliver)
            try:
                await future
            finally:
                self._waiting.discard(future)
        self.check()

    def drop(self, error: LighthouseError) -> None:
        """Discard all queued output. Make pending calls to wait_delivered() raise `error`."""
        self._queue.clear()
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)

    def _drain(self) -> None:
        while self._queue:
            first = self._queue[0]
            if isinstance(first, _Hold):
                if not first.is_released:
                    return
                self._queue.popleft()
            elif self.refusal() is not None:
                return  # the queue will be dropped as soon as the loop gets to it
            else:
                self._queue.popleft()
                first()


FIRST_WITHIN_S = 5.0  # time limit for the first message of a new stream
FLUSH_S = 10.0  # time limit for the peer to read the rest of a closed stream

M = TypeVar("M")
T = TypeVar("T")


class Ending(StrEnum):
    """The reason why a stream has closed."""

    PEER = "peer"  # the peer closed its half, or was killed
    BROKEN = "broken"  # the peer cancelled, or the connection broke
    OURS = "ours"  # end() was called, the handler returned, or the server is stopping
    SLOW = "slow"  # the peer does not read


class Sender:
    """Server side of a stream: sends queued messages and reads requests.

    Create it in the task that serves the stream, and use it only on the event loop.
    """

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        meter: StreamMeter | None = None,
        gate: WriteGate | None = None,
        output: OutputGate | None = None,
    ) -> None:
        """Start the task that writes queued messages.

        `meter` limits the messages from the peer, and `gate` limits large messages to the peer. None means no
        limit. `output` holds back messages until the records written before them are durable.
        """
        self.ending: Ending | None = None
        self.error: LighthouseError | None = None
        self._context = context
        self._meter = meter
        self._output = output or OutputGate()
        self._clock = asyncio.get_running_loop().time
        self._is_lost = False
        self._is_reading = False
        self._ended = asyncio.Event()
        self._outbox = Outbox(self._write_out, gate)
        self._server = asyncio.current_task()
        self._writer = asyncio.create_task(self._write())

    @property
    def is_open(self) -> bool:
        return self.ending is None

    def send(self, message: Body | Message) -> None:
        """Queue a message without blocking. Do nothing on a closed stream.

        If the queue is full because the peer reads too slowly, the stream is closed.
        """
        if self.ending is not None:
            return
        body = message.SerializeToString() if isinstance(message, Message) else message
        self._output.deliver(lambda: self._put(body))

    def _put(self, body: Body) -> None:
        if self.ending is not None:
            return
        if not self._outbox.put(body):
            self.error = LimitReached(
                f"more than {MAX_QUEUED_MESSAGES} messages or {MAX_QUEUED_BYTES >> 20} MiB wait to be read; read faster"
            )
            self._outbox.clear()
            self._set_ending(Ending.SLOW)

    def end(self, error: LighthouseError | None = None) -> None:
        """Close the stream after the queued messages, with the status of `error` if given.

        Do nothing if the stream is closed already.
        """
        self._output.deliver(lambda: self._end_with(error))

    def abort(self, error: LighthouseError) -> None:
        """Discard queued messages and close the stream with the status of `error`."""
        self._outbox.clear()
        self._end_with(error)

    def _end_with(self, error: LighthouseError | None) -> None:
        if self.ending is None:
            self.error = error
            self._set_ending(Ending.OURS)

    # Used by the server.
    async def read(self) -> bytes | None:
        """Return the next request, or None if the stream has closed."""
        if self.ending is not None:
            return None
        self._is_reading = True
        try:
            body = await self._context.read()
        except asyncio.CancelledError:
            self._note_cancelled()
            return None
        except grpc.aio.BaseError:
            self.mark_broken()
            return None
        finally:
            self._is_reading = False
        if body is grpc.aio.EOF:
            self._set_ending(Ending.PEER)
            return None
        if self._meter is not None:
            try:
                self._meter.charge(len(body), self._clock())
            except LimitReached as e:
                self.end(e)
                return None
        return body

    async def finish(self) -> None:
        """Close the stream and flush queued messages for up to FLUSH_S seconds.

        Raises:
            CancelledError: The peer has disconnected.
        """
        self._set_ending(Ending.OURS)
        self._outbox.close()
        is_read = not self._is_lost and self.ending is not Ending.SLOW
        try:
            done, _ = await asyncio.wait((self._writer,), timeout=FLUSH_S if is_read else 0)
        finally:
            self._writer.cancel()
        if self._is_lost:
            raise asyncio.CancelledError
        if not done and self.error is None:
            self.error = LimitReached(f"the last messages were not read within {FLUSH_S:g} s")

    async def _write_out(self, body: bytes) -> None:
        # If this process was suspended, queued output may be outdated when it resumes.
        if self._output.is_open:
            await self._context.write(body)

    async def _write(self) -> None:
        try:
            await self._outbox.run()
        except grpc.aio.BaseError:
            self.mark_broken()
        except TimeoutError:
            self.error = LimitReached(f"a large message was not read within {LARGE_WRITTEN_WITHIN_S:g} s; read faster")
            self._outbox.clear()
            self._set_ending(Ending.SLOW)

    def _note_cancelled(self) -> None:
        # Either our own end() or a lost peer cancelled the task; `ending` is the reason.
        if self.ending is None:
            self.mark_broken()
        while self._server is not None and self._server.cancelling():
            self._server.uncancel()

    def mark_broken(self) -> None:
        """Mark the stream as broken. The server calls this when the task that serves the stream is cancelled."""
        self._is_lost = True
        self._set_ending(Ending.BROKEN)

    def _set_ending(self, ending: Ending) -> None:
        if self.ending is not None:
            return
        self.ending = ending
        self._ended.set()
        if self._is_reading and self._server is not None:
            self._server.cancel()


class Requests(AsyncIterator[M | None]):
    """Async iterator over a peer's messages. Yields None for a message of an unknown type."""

    def __init__(self, sender: Sender, read: Callable[[bytes], M | None]) -> None:
        self._sender = sender
        self._read = read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M | None:
        body = await self._sender.read()
        if body is None:
            raise StopAsyncIteration
        return self._read(body)

    async def read_hello(self, kind: type[T], within_s: float) -> T | None:
        """Return the first message, or None if the stream closes without one.

        If no message arrives within `within_s` seconds, close the stream with InvalidRequest and return None.

        Raises:
            InvalidRequest: The first message is not a `kind`.
        """
        missing = InvalidRequest(f"none came within {within_s:g} s", field="hello")
        limit = asyncio.get_running_loop().call_later(within_s, self._sender.end, missing)
        try:
            async for message in self:
                if isinstance(message, kind):
                    return message
                if message is not None:
                    raise InvalidRequest("must be the first message of this stream", field="hello")
            return None
        finally:
            limit.cancel()


# Streams of message objects instead of bytes. A message to many peers is serialised once.


class Frames(Generic[M]):
    """Serialiser for a stream's messages. Caches the last result, because many peers receive the same message."""

    def __init__(self, to_wire: Callable[[M], Message]) -> None:
        self._to_wire = to_wire
        self._newest: M | None = None
        self._bytes = b""

    def encode(self, message: M) -> Body:
        return self.to_bytes(message)

    def to_bytes(self, message: M) -> bytes:
        if message is not self._newest:
            self._newest, self._bytes = message, self._to_wire(message).SerializeToString()
        return self._bytes


class StreamPeer(Generic[M]):
    """Implementation of lighthouse_runtime.ports.Peer for a stream."""

    def __init__(self, sender: Sender, frames: Frames[M]) -> None:
        self._sender = sender
        self._frames = frames

    def send(self, message: M) -> None:
        self._sender.send(self._frames.encode(message))

    def end(self, error: LighthouseError | None = None) -> None:
        self._sender.end(error)
