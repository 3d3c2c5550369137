"""How long to wait before the next attempt to connect."""

import asyncio
import random

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5


class Backoff:
    """Grows from FIRST_BACKOFF_S to MAX_BACKOFF_S, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    async def wait(self) -> None:
        delay = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(MAX_BACKOFF_S, 2 * self._next_s)
        await asyncio.sleep(delay)
