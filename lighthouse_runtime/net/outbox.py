"""Bounded send queue of a stream. put() never blocks, and one task writes the messages in order.

The bound keeps a peer that does not read from using up this process's memory.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

# Limit on large messages in transit, to one peer over all its streams, and to all peers.
#
# A quorum of 10,000 groups is sent to each of them, 200 KB each. Serialised and passed to gRPC at once, these messages
# would take 2 GB. Messages that wait here are references to bytes that all streams share.

LARGE_BYTES = 64 * 1024
MAX_BYTES_UNDER_WAY = 32 * 1024 * 1024
MAX_BYTES_TO_ALL = 128 * 1024 * 1024


class WriteGate:
    """Limits the total size of large messages being written. Messages enter in order of arrival.

    A message that is larger than the limit enters when no other message is being written.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_UNDER_WAY, parent: "WriteGate | None" = None) -> None:
        """Create a gate for `max_bytes`. A message must also enter `parent`, which several gates may share."""
        self._max_bytes = max_bytes
        self._parent = parent
        self._under_way = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> None:
        """Wait until there is room for a message of `size` bytes. Call leave() after the message is written."""
        await self._enter(size)
        if self._parent is not None:
            try:
                await self._parent.enter(size)
            except BaseException:
                self._leave(size)
                raise

    def leave(self, size: int) -> None:
        if self._parent is not None:
            self._parent.leave(size)
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

Body = bytes | tuple[bytes, ...]  # a message, or its parts, which many streams can share until it is written


class Outbox:
    """Send queue of one stream. A task must execute run(), which writes the messages."""

    def __init__(self, write: Callable[[bytes], Awaitable[object]], gate: WriteGate | None = None) -> None:
        """Create an empty queue. `gate`, if given, limits large messages over all streams to the same peer."""
        self._write = write
        self._gate = gate
        self._queue: deque[Body] = deque()
        self._queued_bytes = 0
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, body: Body) -> bool:
        """Queue a message, or return False if the queue is full.

        An empty queue accepts a message of any size. After close(), messages are silently dropped.
        """
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
        """Stop accepting messages. run() returns when all queued messages are written."""
        self._is_closed = True
        self._wake()

    def clear(self) -> None:
        """Discard all queued messages and close."""
        self._queue.clear()
        self.close()

    async def run(self) -> None:
        """Write messages until the queue is closed and empty.

        Raise TimeoutError if the peer takes more than LARGE_WRITTEN_WITHIN_S to read a large message, because other
        messages may be waiting for room.
        """
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
