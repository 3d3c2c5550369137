"""Timers that know of a suspended machine."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lighthouse_runtime.ports import Timer

# Linux's CLOCK_MONOTONIC, which asyncio reads, stands still while the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SuspensionTimers:
    """`lighthouse_runtime.ports.Timers` of a loop, by a clock that goes on while the machine is suspended: whoever may
    act until a moment may not act after it, however long the machine has slept. A timer can be late by that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return time.clock_gettime(_CLOCK)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._loop.call_later(max(0.0, when - self.time()), callback, *args)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._loop.call_later(delay, callback, *args)
