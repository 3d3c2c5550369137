"""The virtual clock and the processes that run on it. Nothing here knows quorums.

Everything that happens is a callback of a process at a moment. A killed process receives none. A paused process
receives them in their order when it wakes, and a slow process takes its time over each. Each process has its own clock,
with its own rate, from which its machine gets the time.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

MIN_RATE, MAX_RATE = 0.9, 1.1
TIMER_SLACK_S = 1e-6
# Timers of a real loop are late. Messages that arrive meanwhile come before them.
MAX_TIMER_LATENESS_S = 0.02
# The number of ticks without progress that counts as a defect of a machine.
MAX_IDLE_TICKS = 200


class Violation(Exception):  # noqa: N818  the name that a reader looks for
    """A promise of docs/contributing/protocol.md is broken. The text begins with its number."""


def violated(rule: str, text: str) -> NoReturn:
    raise Violation(f"{rule} {text}")


class Died(Exception):  # noqa: N818
    """Unwind the callback in which its process was killed."""


@dataclass(slots=True)
class Result:
    seed: int
    violation: str = ""
    simulated_s: float = 0.0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])


class World:
    on_send: Callable[[str, str, Any], None] | None = None
    """Called with the sender, the receiver and each message, in all worlds."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.is_calm = False  # no more faults
        self._trace = trace
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._is_stopped = False

    def log(self, who: str, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.4f}  {who:<12} {text}")

    def sends(self, who: str, to: str, message: Any) -> None:
        if World.on_send is not None:
            World.on_send(who, to, message)

    def at(self, moment: float, process: "Process | None", act: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (moment, self._pushed, process, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` for no process: faults and checks."""
        self.at(self.now + delay_s, None, act, *args)

    def stop(self) -> None:
        self._is_stopped = True

    def run(self, until: float) -> None:
        self._is_stopped = False
        heap = self._heap
        while heap and heap[0][0] <= until and not self._is_stopped:
            self.now, _, process, act, args = heapq.heappop(heap)
            self.events += 1
            if process is not None:
                if not process.is_up:
                    continue
                if process.held_until > self.now:
                    self.at(process.held_until, process, act, *args)
                    continue
                if process.slow_s:
                    process.held_until = self.now + process.slow_s
            try:
                act(*args)
            except Died:
                continue
        if not self._is_stopped:
            self.now = until


class Process:
    """One life of something that runs on `host`. A restart creates another one."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.is_up = True
        self.held_until = 0.0
        self.slow_s = 0.0
        self.rate = world.random.uniform(MIN_RATE, MAX_RATE)
        self._offset = world.random.uniform(0, 1000)
        self._lateness = random.Random(world.random.random())
        self.on_death: list[Callable[[], None]] = []

    @property
    def is_paused(self) -> bool:
        return self.held_until > self.world.now

    def clock(self) -> float:
        return self._offset + self.world.now * self.rate

    def moment(self, clock: float) -> float:
        """Return the world's time at a reading of this process's clock."""
        return (clock - self._offset) / self.rate

    def timer_lateness_s(self) -> float:
        """Draw how late a timer fires, mostly less than a millisecond."""
        return TIMER_SLACK_S + MAX_TIMER_LATENESS_S * self._lateness.random() ** 4

    def drift(self, rate: float) -> None:
        """Change the rate of the process's clock, without a jump."""
        self._offset, self.rate = self.clock() - self.world.now * rate, rate

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` after `delay_s` of the world's time, unless the process has died."""
        self.world.at(self.world.now + delay_s, self, act, *args)

    def pause(self, for_s: float) -> None:
        self.held_until = max(self.held_until, self.world.now + for_s)

    def slow(self, by_s: float, for_s: float) -> None:
        """Add `by_s` to everything that the process does, for a while."""
        self.slow_s = by_s
        self.world.after(for_s, setattr, self, "slow_s", 0.0)

    def kill(self) -> None:
        if not self.is_up:
            return
        self.is_up = False
        for act in self.on_death:
            act()

    def log(self, text: str) -> None:
        self.world.log(self.name, text)


class Timer:
    """A timer of a process that calls its machine at the machine's deadline."""

    def __init__(self, process: Process, act: Callable[[], None]) -> None:
        self._process = process
        self._act = act
        self._set_to: float | None = None
        self._idle = 0

    def set(self, deadline: float | None) -> None:
        """Set the timer by the process's clock, unless an earlier setting comes first."""
        if deadline is None:
            return
        process = self._process
        moment = max(process.world.now, process.moment(deadline)) + process.timer_lateness_s()
        if self._set_to is not None and process.world.now <= self._set_to <= moment:
            return
        self._set_to = moment
        self._idle = self._idle + 1 if process.moment(deadline) <= process.world.now + TIMER_SLACK_S else 0
        if self._idle > MAX_IDLE_TICKS:
            raise Violation(f"deadline: {process.name} wants to be called again and again at {process.world.now:.6f}")
        process.world.at(moment, process, self._fire, moment)

    def _fire(self, moment: float) -> None:
        if self._set_to == moment:
            self._set_to = None
            self._act()


class Timers:
    """The clock and timers of a process for a production driver (lighthouse_runtime.ports.Timers)."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._idle = 0

    def time(self) -> float:
        return self._process.clock()

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> "Call":
        process = self._process
        now = process.world.now
        moment = max(now, process.moment(when)) + process.timer_lateness_s()
        self._idle = self._idle + 1 if process.moment(when) <= now + TIMER_SLACK_S else 0
        if self._idle > MAX_IDLE_TICKS:
            raise Violation(f"deadline: {process.name} wants to be called again and again at {now:.6f}")
        call = Call(self, when, callback, args)
        process.world.at(moment, process, call.fire)
        return call

    def is_due(self, when: float) -> bool:
        return self._process.moment(when) <= self._process.world.now

    def again(self, call: "Call", when: float) -> None:
        """Set a call again that fired too early, because the clock has slowed down since."""
        process = self._process
        process.world.at(process.moment(when) + TIMER_SLACK_S, process, call.fire)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> "Call":
        return self.call_at(self.time() + delay, callback, *args)


class Call:
    def __init__(self, timers: Timers, when: float, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._timers = timers
        self._when = when
        self._callback: Callable[..., Any] | None = callback
        self._args = args

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is None:
            return
        if self._timers.is_due(self._when):
            self._callback(*self._args)
        else:
            self._timers.again(self, self._when)
