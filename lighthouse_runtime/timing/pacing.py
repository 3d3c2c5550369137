"""How often something is tried, logged, read or built, and for how long a process has stood still."""

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lighthouse_protocol.refusals import DeadlinePassed
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer

# -- backoff ------------------------------------------------------------------
#
# How long to wait before the next attempt to connect.

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


# -- sparse log ---------------------------------------------------------------
#
# Warnings that a flood would repeat: a log must not grow at the speed of a flood.

EVERY_S = 10.0


class SparseLog:
    """One line in a while; it says how many have been left out since the last one."""

    def __init__(
        self,
        log: logging.Logger,
        name: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the event of each line."""
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
        more = f" ({self._left_out} more such lines were left out before)" if self._left_out else ""
        self._at, self._left_out = now, 0
        self._log.warning(text + "%s", *values, more, extra=event(self._name))


# -- reading ------------------------------------------------------------------
#
# A blocking read with a deadline: on a thread of its own, which the end of the program does not wait for.

T = TypeVar("T")


class Reading(Generic[T]):
    """`read` begins at once; it may fail, and may never return."""

    def __init__(self, name: str, read: Callable[[], T], limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s
        self._outcomes = queue.SimpleQueue[tuple[T | None, Exception | None]]()
        threading.Thread(target=self._run, args=(read,), name=f"read {name}", daemon=True).start()

    def result(self) -> T:
        """What was read. Waits until `limit_s` after the beginning at most; to be called once.

        Raises what `read` raised, and DeadlinePassed.
        """
        try:
            value, error = self._outcomes.get(timeout=max(0.0, self._ends_at - time.monotonic()))
        except queue.Empty:
            raise DeadlinePassed(f"no answer within {self._limit_s:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # of T, which None may be

    def _run(self, read: Callable[[], T]) -> None:
        try:
            self._outcomes.put((read(), None))
        except Exception as e:  # noqa: BLE001  it is raised by result()
            self._outcomes.put((None, e))


# -- snapshots ----------------------------------------------------------------
#
# A view that many ask for, built once for all: whoever asks pays nothing, and all askers together a share of the
# time.
#
# What is cheap is built for each; what took long is shown again for so long that building takes LOOP_SHARE of the
# time.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LOOP_SHARE = 0.05
CHEAP_S = 0.005
MAX_KEPT = 16


@dataclass(frozen=True, slots=True)
class _Built(Generic[V]):
    value: V
    until: float


class Snapshots(Generic[K, V]):
    """`build` makes the view of a key, and may raise: that is not kept."""

    def __init__(self, build: Callable[[K], V], clock: Callable[[], float] = time.monotonic) -> None:
        self._build = build
        self._clock = clock
        self._kept: dict[K, _Built[V]] = {}

    def of(self, key: K) -> V:
        """At most as old as what it cost allows."""
        began_at = self._clock()
        kept = self._kept.get(key)
        if kept is not None and began_at < kept.until:
            return kept.value
        value = self._build(key)
        now = self._clock()
        self._kept.pop(key, None)
        if now - began_at > CHEAP_S:
            self._drop_old(now)
            self._kept[key] = _Built(value, now + (now - began_at) / LOOP_SHARE)
        return value

    def _drop_old(self, now: float) -> None:
        self._kept = {key: kept for key, kept in self._kept.items() if now < kept.until}
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]


# -- suspension ---------------------------------------------------------------
#
# Timers that know of a suspended machine.

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
