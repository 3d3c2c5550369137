"""Messages on their way into one stream: put() never blocks, one task writes them in order.

What a peer does not read waits here, within limits: a peer that reads nothing must not cost without end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

# -- write gate ---------------------------------------------------------------
#
# Large messages: a few at a time are on their way to one peer, whatever the number of its streams, and to all peers.
#
# A quorum of ten thousand groups is told to each of them, 200 KB each: made and handed to gRPC all at once they would
# be 2 GB. What waits here is a reference to bytes that all share.

LARGE_BYTES = 64 * 1024
MAX_BYTES_UNDER_WAY = 32 * 1024 * 1024
MAX_BYTES_TO_ALL = 128 * 1024 * 1024


class WriteGate:
    """In the order of asking. One message may always pass, however large. `beyond`: what all of them pass next."""

    def __init__(self, max_bytes: int = MAX_BYTES_UNDER_WAY, beyond: "WriteGate | None" = None) -> None:
        self._max_bytes = max_bytes
        self._beyond = beyond
        self._under_way = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> None:
        """Wait until a message of that size may be made. Each that has entered must leave()."""
        await self._enter(size)
        if self._beyond is not None:
            try:
                await self._beyond.enter(size)
            except BaseException:
                self._leave(size)
                raise

    def leave(self, size: int) -> None:
        if self._beyond is not None:
            self._beyond.leave(size)
        self._leave(size)

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._has_room(size):
            self._under_way += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size)
            raise

    def _leave(self, size: int) -> None:
        self._under_way -= size
        while self._waiting:
            waiting_size, turn = self._waiting[0]
            if not turn.done() and not self._has_room(waiting_size):
                return
            self._waiting.popleft()
            if not turn.done():
                self._under_way += waiting_size
                turn.set_result(None)

    def _has_room(self, size: int) -> bool:
        return self._under_way == 0 or self._under_way + size <= self._max_bytes


MAX_QUEUED_MESSAGES = 10_000
MAX_QUEUED_BYTES = 16 * 1024 * 1024
LARGE_WRITTEN_WITHIN_S = 10.0

Body = bytes | tuple[bytes, ...]
"""A message, or its parts: what many are told is kept once until it is written."""


class Outbox:
    """Nothing is taken after close() or clear(). run() belongs into a task of its own."""

    def __init__(self, write: Callable[[bytes], Awaitable[object]], gate: WriteGate | None = None) -> None:
        """`gate`: for large messages, of all streams of one peer."""
        self._write = write
        self._gate = gate
        self._queue: deque[Body] = deque()
        self._queued_bytes = 0
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, body: Body) -> bool:
        """False when the limits are reached: the peer does not read. One message always has room."""
        if self._is_closed:
            return True
        if self._queue and (
            len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes + _size(body) > MAX_QUEUED_BYTES
        ):
            return False
        self._queue.append(body)
        self._queued_bytes += _size(body)
        self._wake()
        return True

    def close(self) -> None:
        """run() returns when all that was put has been written."""
        self._is_closed = True
        self._wake()

    def clear(self) -> None:
        """Nothing that waits is written any more."""
        self._queue.clear()
        self.close()

    async def run(self) -> None:
        """Raises TimeoutError where a large message is not written in time: others wait for its peer."""
        while self._queue or not self._is_closed:
            if not self._queue:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            body = self._queue.popleft()
            size = _size(body)
            self._queued_bytes -= size
            if self._gate is None or size < LARGE_BYTES:
                await self._write(_whole(body))
            else:
                await self._write_large(body, size, self._gate)

    async def _write_large(self, body: Body, size: int, gate: WriteGate) -> None:
        await gate.enter(size)
        try:
            async with asyncio.timeout(LARGE_WRITTEN_WITHIN_S):
                await self._write(_whole(body))
        finally:
            gate.leave(size)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def _whole(body: Body) -> bytes:
    return body if isinstance(body, bytes) else b"".join(body)
