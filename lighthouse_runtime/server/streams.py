"""The server's side of one open stream, as a handler sees it.

grpc.aio cancels a handler whose peer has gone, and shows a killed peer as one that has ended its requests. Here both
are an end of the iteration, and so is an end from our side; Sender.ending says which.
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

# -- output gate --------------------------------------------------------------
#
# What a server says, in order, behind what must be written down before it.
#
# A record that is written elsewhere is not durable yet when its rules go on. Whatever they say from then on waits
# here until the store has acknowledged it: to the peers it is as if the server had stood still meanwhile. Where the
# server may not speak at all (it does not lead), nothing passes, and every caller is refused.


class _Hold:
    """In the queue until it is released, and all that came before it."""

    def __init__(self) -> None:
        self.is_released = False


class OutputGate:
    """`refusal` says at this moment why nothing may leave; None: it may."""

    def __init__(self, refusal: Callable[[], LighthouseError | None] = lambda: None) -> None:
        self._refusal = refusal
        self._queue: deque[Callable[[], None] | _Hold] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_open(self) -> bool:
        """Calls are taken."""
        return self._refusal() is None

    @property
    def is_held(self) -> bool:
        return bool(self._queue)

    def refusal(self) -> LighthouseError | None:
        """Why no call is taken; None: calls are taken."""
        return self._refusal()

    def check(self) -> None:
        """Raises why no call is taken."""
        if (refusal := self._refusal()) is not None:
            raise refusal

    def hold(self) -> Callable[[], None]:
        """What is said from here on waits for the call of what is returned."""
        hold = _Hold()
        self._queue.append(hold)

        def release() -> None:
            hold.is_released = True
            self._drain()

        return release

    def pass_on(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` when all that is held has been released: now, if nothing is. Never, if that is dropped."""
        if self._queue:
            self._queue.append(deliver)
        elif self._refusal() is None:
            deliver()

    async def passed(self) -> None:
        """Wait for all that is held at this moment. Raises the refusal if it is dropped, or nothing may leave."""
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
        """Nothing that waits is ever said; each call that waits ends with `error`."""
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
            elif self._refusal() is not None:
                return  # and dropped, as soon as the loop comes to it
            else:
                self._queue.popleft()
                first()


FIRST_WITHIN_S = 5.0  # how long a stream that was opened may say nothing
FLUSH_S = 10.0  # how long an ended stream waits for its peer to read the rest

M = TypeVar("M")
T = TypeVar("T")


class Ending(StrEnum):
    """How a stream ended."""

    PEER = "peer"  # the peer has ended its half; a killed one may look like that, too
    BROKEN = "broken"  # the peer cancelled, or the connection is lost
    OURS = "ours"  # end() was called, the handler returned, or the server stops
    SLOW = "slow"  # the peer does not read


class Sender:
    """To be called on the loop only. Made in the task that serves the stream."""

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        meter: StreamMeter | None = None,
        gate: WriteGate | None = None,
        output: OutputGate | None = None,
    ) -> None:
        """`meter`: how much the peer may send; without one, any amount. `gate`: for what it is sent. `output`: when it
        may leave."""
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
        """Queue it, without waiting. After the end nothing happens. A peer that lets the queue grow is sent away."""
        if self.ending is not None:
            return
        body = message.SerializeToString() if isinstance(message, Message) else message
        self._output.pass_on(lambda: self._put(body))

    def _put(self, body: Body) -> None:
        if self.ending is not None:
            return
        if not self._outbox.put(body):
            self.error = LimitReached(
                f"more than {MAX_QUEUED_MESSAGES} messages or {MAX_QUEUED_BYTES >> 20} MiB wait to be read; read faster"
            )
            self._outbox.clear()
            self._end(Ending.SLOW)

    def end(self, error: LighthouseError | None = None) -> None:
        """End the stream when what is queued was sent: well, or with `error` as its status. The first end counts."""
        self._output.pass_on(lambda: self._end_with(error))

    def break_with(self, error: LighthouseError) -> None:
        """End the stream with `error`; what is queued is not sent."""
        self._outbox.clear()
        self._end_with(error)

    def _end_with(self, error: LighthouseError | None) -> None:
        if self.ending is None:
            self.error = error
            self._end(Ending.OURS)

    # -- for the server

    async def read(self) -> bytes | None:
        """The next request; None after the end."""
        if self.ending is not None:
            return None
        self._is_reading = True
        try:
            body = await self._context.read()
        except asyncio.CancelledError:
            self._note_cancelled()
            return None
        except grpc.aio.BaseError:
            self._lose()
            return None
        finally:
            self._is_reading = False
        if body is grpc.aio.EOF:
            self._end(Ending.PEER)
            return None
        if self._meter is not None:
            try:
                self._meter.take(len(body), self._clock())
            except LimitReached as e:
                self.end(e)
                return None
        return body

    def break_off(self) -> None:
        """The task that serves the stream is cancelled."""
        self._lose()

    async def finish(self) -> None:
        """Send what is queued, if the peer may still read. Raises CancelledError if the peer has gone."""
        self._end(Ending.OURS)
        self._outbox.close()
        is_read = not self._is_lost and self.ending is not Ending.SLOW
        try:
            done, _ = await asyncio.wait((self._writer,), timeout=FLUSH_S if is_read else 0)
        finally:
            self._writer.cancel()
        if self._is_lost:
            raise asyncio.CancelledError
        if not done and self.error is None:
            self.error = LimitReached(f"what was left to say was not read within {FLUSH_S:g} s")

    async def _write_out(self, body: bytes) -> None:
        """What was queued before this process was stopped may be too old when it goes on."""
        if self._output.is_open:
            await self._context.write(body)

    async def _write(self) -> None:
        try:
            await self._outbox.run()
        except grpc.aio.BaseError:
            self._lose()
        except TimeoutError:
            self.error = LimitReached(f"a large message was not read within {LARGE_WRITTEN_WITHIN_S:g} s; read faster")
            self._outbox.clear()
            self._end(Ending.SLOW)

    def _note_cancelled(self) -> None:
        """The task was cancelled: by our own end, or because the peer has gone. Both are told by `ending`."""
        if self.ending is None:
            self._lose()
        while self._server is not None and self._server.cancelling():
            self._server.uncancel()

    def _lose(self) -> None:
        self._is_lost = True
        self._end(Ending.BROKEN)

    def _end(self, ending: Ending) -> None:
        if self.ending is not None:
            return
        self.ending = ending
        self._ended.set()
        if self._is_reading and self._server is not None:
            self._server.cancel()


class Requests(AsyncIterator[M | None]):
    """What the peer of a stream sends; None for a message that this version does not know."""

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

    async def hello(self, kind: type[T], within_s: float) -> T | None:
        """The first message, which is of that kind; None if the stream ends before.

        It ends with InvalidRequest when none has come within that time. Raises InvalidRequest for another message.
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


# -- stream peer --------------------------------------------------------------
#
# A stream as a driver sees it: messages, not bytes. What goes to many is serialised once.


class Frames(Generic[M]):
    """The bytes of the messages of one kind of stream; those of the newest message are kept."""

    def __init__(self, to_wire: Callable[[M], Message]) -> None:
        self._to_wire = to_wire
        self._newest: M | None = None
        self._bytes = b""

    def of(self, message: M) -> Body:
        return self.bytes_of(message)

    def bytes_of(self, message: M) -> bytes:
        if message is not self._newest:
            self._newest, self._bytes = message, self._to_wire(message).SerializeToString()
        return self._bytes


class StreamPeer(Generic[M]):
    """A lighthouse_runtime.ports.Peer."""

    def __init__(self, sender: Sender, frames: Frames[M]) -> None:
        self._sender = sender
        self._frames = frames

    def send(self, message: M) -> None:
        self._sender.send(self._frames.of(message))

    def end(self, error: LighthouseError | None = None) -> None:
        self._sender.end(error)
