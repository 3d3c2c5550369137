"""Backoff, rate-limited warnings, reads with a deadline, cached values, and a clock that includes suspensions."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable
from concurrent import futures
from typing import Any, Generic, TypeVar

from lighthouse_protocol.refusals import DeadlinePassed
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer

# Delays between attempts to connect.

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5


class Backoff:
    """Exponential backoff from FIRST_BACKOFF_S to MAX_BACKOFF_S, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    async def wait(self) -> None:
        delay = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(MAX_BACKOFF_S, 2 * self._next_s)
        await asyncio.sleep(delay)


# Warnings that an attacker can repeat at will.

EVERY_S = 10.0


class SparseLog:
    """Logs at most one warning per `every_s` seconds, with the number of warnings suppressed since the last one."""

    def __init__(
        self,
        log: logging.Logger,
        name: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a rate-limited log. `name` is the event name of its warnings, as in log_event.event()."""
        self._log = log
        self._name = name
        self._every_s = every_s
        self._clock = clock
        self._at: float | None = None
        self._left_out = 0

    def warning(self, text: str, *values: object) -> None:
        now = self._clock()
        if self._at is not None and now - self._at < self._every_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} similar lines were suppressed before)" if self._left_out else ""
        self._at, self._left_out = now, 0
        self._log.warning(text + "%s", *values, more, extra=event(self._name))


# Blocking reads, on a daemon thread that does not delay the program's exit.

T = TypeVar("T")


def start_read(name: str, read: Callable[[], T]) -> futures.Future[T]:
    """Run `read` in a new thread called `name`. Return a future for the result. The future cannot be cancelled."""
    done = futures.Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(read())
        except Exception as e:  # noqa: BLE001  raised to whoever reads the future
            done.set_exception(e)

    threading.Thread(target=run, name=f"read {name}", daemon=True).start()
    return done


class BackgroundRead(Generic[T]):
    """Runs `read` in a new thread, starting at once. `read` may raise, or never return."""

    def __init__(self, name: str, read: Callable[[], T], limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._reading = start_read(name, read)

    def result(self) -> T:
        """Return the result, or raise what `read` raised.

        Raise DeadlinePassed if `read` takes more than `limit_s` seconds.
        """
        if not futures.wait((self._reading,), max(0.0, self._ends_at - time.monotonic())).done:
            raise DeadlinePassed(f"no answer within {self._limit_s:g} s")
        return self._reading.result()


# Values that many clients request, such as the status. Building them takes at most the share LOOP_SHARE of the loop's
# time: a value that is cheap to build is built for each request, and an expensive one is reused for a while.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LOOP_SHARE = 0.05
CHEAP_S = 0.005
MAX_KEPT = 16


class Snapshots(Generic[K, V]):
    """Cache of values that are slow to build, such as the status."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[K, tuple[V, float]] = {}  # each until a time of the clock

    def get(self, key: K, build: Callable[[], V]) -> V:
        """Return the cached value for `key`, or else call `build` and return its result. Exceptions are not cached.

        A value that is slow to build is reused for a time proportional to the time that `build` took.
        """
        began_at = self._clock()
        kept = self._kept.get(key)
        if kept is not None and began_at < kept[1]:
            return kept[0]
        value = build()
        now = self._clock()
        self._kept.pop(key, None)
        if now - began_at > CHEAP_S:
            self._kept = {key: kept for key, kept in self._kept.items() if now < kept[1]}
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (value, now + (now - began_at) / LOOP_SHARE)
        return value


# A clock that includes the time in which the machine is suspended.

# Linux's CLOCK_MONOTONIC, which asyncio uses, stops while the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SuspensionTimers:
    """Implements lighthouse_runtime.ports.Timers with a clock that advances while the machine is suspended.

    A lease on this clock expires even if the machine sleeps. A timer may fire late by the length of a suspension.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return time.clock_gettime(_CLOCK)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._loop.call_later(max(0.0, when - self.time()), callback, *args)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._loop.call_later(delay, callback, *args)
