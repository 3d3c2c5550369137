"""A loop whose time goes on only when a test says so: for what sets timers and reads the loop's clock."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Timer:
    act: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualLoop:
    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, act: Callable[..., None], *given: object) -> Timer:
        timer = Timer(lambda: act(*given))
        heapq.heappush(self._timers, (self.now + delay_s, next(self._numbers), timer))
        return timer

    def call_at(self, at: float, act: Callable[..., None], *given: object) -> Timer:
        return self.call_later(at - self.now, act, *given)

    @property
    def timers(self) -> int:
        return sum(not timer.is_cancelled for *_, timer in self._timers)

    def go(self, by_s: float) -> None:
        ends_at = self.now + by_s
        while self._timers and self._timers[0][0] <= ends_at:
            at, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, at)  # a test that has set it on has held the loop up
            if not timer.is_cancelled:
                timer.act()
        self.now = max(self.now, ends_at)
