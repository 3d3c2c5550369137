"""Messages on their way into one stream: put() never blocks, one task writes them in order.

What a peer does not read waits here, within limits: a peer that reads nothing must not cost without end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

MAX_QUEUED_MESSAGES = 10_000
MAX_QUEUED_BYTES = 64 * 1024 * 1024


class Outbox:
    """Nothing is taken after close() or clear(). run() belongs into a task of its own."""

    def __init__(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        self._write = write
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, body: bytes) -> bool:
        """False when the limits are reached: the peer does not read. One message always has room."""
        if self._is_closed:
            return True
        if self._queue and (
            len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes + len(body) > MAX_QUEUED_BYTES
        ):
            return False
        self._queue.append(body)
        self._queued_bytes += len(body)
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
        while self._queue or not self._is_closed:
            if not self._queue:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            body = self._queue.popleft()
            self._queued_bytes -= len(body)
            await self._write(body)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
