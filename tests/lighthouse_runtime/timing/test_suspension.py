import asyncio
import time
from collections.abc import Callable

import pytest

from lighthouse_runtime.ports import Timer
from lighthouse_runtime.timing.pacing import SuspensionTimers


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is put here is how long the machine has been suspended."""
    suspended, clock = [0.0], time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(time.CLOCK_MONOTONIC) + sum(suspended))
    return suspended


async def test_its_clock_goes_on_while_the_machine_is_suspended(slept: list[float]):
    timers, loop = SuspensionTimers(asyncio.get_running_loop()), asyncio.get_running_loop()
    ahead_s = timers.time() - loop.time()
    slept.append(3600.0)
    assert timers.time() - loop.time() - ahead_s == pytest.approx(3600.0, abs=1.0)


@pytest.mark.parametrize("is_moment", [True, False])
async def test_a_timer_fires_at_its_moment_and_not_when_cancelled(is_moment: bool):
    timers, fired = SuspensionTimers(asyncio.get_running_loop()), asyncio.Event()
    moment = timers.time() + 0.05

    def set_to(act: Callable[[], None]) -> Timer:
        return timers.call_at(moment, act) if is_moment else timers.call_later(0.05, act)

    cancelled: list[bool] = []
    set_to(lambda: cancelled.append(True)).cancel()
    set_to(fired.set)
    async with asyncio.timeout(10):
        await fired.wait()
    assert timers.time() >= moment
    assert cancelled == []


async def test_a_moment_that_was_slept_through_is_due_at_once(slept: list[float]):
    timers, fired = SuspensionTimers(asyncio.get_running_loop()), asyncio.Event()
    moment = timers.time() + 60.0
    slept.append(3600.0)
    timers.call_at(moment, fired.set)
    async with asyncio.timeout(10):
        await fired.wait()
