"""Messages on their way into one stream: put() never blocks, one task writes them in order.

What a peer does not read waits here, within limits: a peer that reads nothing must not cost without end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from lighthouse_runtime.net.write_gate import LARGE_BYTES, WriteGate

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
