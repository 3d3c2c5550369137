"""A view that many ask for, built once for all: whoever asks pays nothing, and all askers together a share of the time.

What is cheap is built for each; what took long is shown again for so long that building takes LOOP_SHARE of the time.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
