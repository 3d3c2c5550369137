"""What a server says, in order, behind what must be written down before it.

A record that is written elsewhere is not durable yet when its rules go on. Whatever they say from then on waits here
until the store has acknowledged it: to the peers it is as if the server had stood still meanwhile. Where the server may
not speak at all (it does not lead), nothing passes, and every caller is refused.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from lighthouse_protocol.refusals import LighthouseError


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
