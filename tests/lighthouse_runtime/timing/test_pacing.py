"""Views that are built at most so often, logs without repeats, and reads in the background."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from lighthouse_protocol.refusals import DeadlinePassed, WrongState
from lighthouse_runtime.ports import Timer
from lighthouse_runtime.timing import pacing
from lighthouse_runtime.timing.pacing import CHEAP_S, LOOP_SHARE, BackgroundRead, Snapshots, SparseLog, SuspensionTimers


class Builder:
    """Each view takes `cost_s`, and is numbered."""

    def __init__(self, cost_s: float) -> None:
        self.now = 100.0
        self.cost_s = cost_s
        self.built = 0
        self.views = Snapshots[str, str](lambda: self.now)

    def get(self, key: str) -> str:
        return self.views.get(key, lambda: self.build(key))

    def build(self, key: str) -> str:
        self.now += self.cost_s
        self.built += 1
        if key == "bad":
            raise ValueError(key)
        return f"{key}{self.built}"


def test_what_is_cheap_is_never_old():
    builder = Builder(CHEAP_S / 2)
    assert [builder.get("a") for _ in range(3)] == ["a1", "a2", "a3"]


def test_what_costs_much_takes_its_share_of_the_time_however_many_ask():
    builder = Builder(0.1)
    began_at = builder.now
    while builder.now < began_at + 100.0:
        builder.get("a")
        builder.now += 0.001
    assert builder.built * builder.cost_s <= 1.01 * LOOP_SHARE * (builder.now - began_at) + builder.cost_s
    assert builder.built > 10


def test_each_key_has_a_view_of_its_own_and_few_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pacing, "MAX_KEPT", 2)
    builder = Builder(0.1)
    assert [builder.get(key) for key in "aba"] == ["a1", "b2", "a1"]
    builder.get("c")
    assert len(builder.views._kept) == 2


def test_a_failure_is_not_kept():
    builder = Builder(0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            builder.get("bad")
    assert builder.built == 2


def test_what_was_read_is_returned() -> None:
    assert BackgroundRead("x", lambda: 7, 60).result() == 7


def test_its_error_is_raised_where_it_is_waited_for() -> None:
    def fail() -> int:
        raise WrongState("no")

    with pytest.raises(WrongState, match="no"):
        BackgroundRead("x", fail, 60).result()


def test_one_that_hangs_ends_at_its_deadline_and_holds_nothing_up() -> None:
    never = threading.Event()
    reading = BackgroundRead("x", never.wait, 0.05)
    with pytest.raises(DeadlinePassed, match=r"no answer within 0\.05 s"):
        reading.result()
    never.set()


def test_what_was_left_out_is_counted_in_the_next_line(caplog: pytest.LogCaptureFixture):
    now = 5.0
    log = SparseLog(logging.getLogger("flood"), "flooded", every_s=10, clock=lambda: now)
    for now in (5.0, 6.0, 14.9, 15.0, 30.0):
        log.warning("refused: %s", now)
    assert [record.getMessage() for record in caplog.records] == [
        "refused: 5.0",
        "refused: 15.0 (2 similar lines were suppressed before)",
        "refused: 30.0",
    ]


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
