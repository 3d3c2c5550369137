"""Large messages: a few at a time are on their way to one peer, whatever the number of its streams, and to all peers.

A quorum of ten thousand groups is told to each of them, 200 KB each: made and handed to gRPC all at once they would be
2 GB. What waits here is a reference to bytes that all share.
"""

import asyncio
from collections import deque

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
