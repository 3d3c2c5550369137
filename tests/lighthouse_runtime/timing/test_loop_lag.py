"""A process that was held up is told so once, by how much, and not when it has stopped."""

import pytest

from lighthouse_runtime.timing.timers import CHECKED_EVERY_S, LATE_AFTER_S, LoopLag
from tests.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture
def told() -> list[float]:
    return []


@pytest.fixture
def lag(loop: VirtualLoop, told: list[float]) -> LoopLag:
    lag = LoopLag(loop, "nobody minds")
    lag.listen(told.append)
    lag.watch()
    return lag


def test_whoever_looks_first_is_told_before_the_timer(
    loop: VirtualLoop, lag: LoopLag, told: list[float], caplog: pytest.LogCaptureFixture
):
    loop.go(10)
    loop.now += 5
    for _ in range(2):
        lag.check()
    assert told == [pytest.approx(5 - CHECKED_EVERY_S)]
    assert caplog.messages == ["this process was paused for 4.8 s; nobody minds"]
    loop.go(10)
    assert (len(told), lag.late_s) == (1, told[0])


def test_the_timer_finds_it_where_nobody_looks(loop: VirtualLoop, lag: LoopLag, told: list[float]):
    loop.now += 5
    loop.go(0)
    assert told == [pytest.approx(5 - CHECKED_EVERY_S)]


def test_a_moment_is_nothing(loop: VirtualLoop, lag: LoopLag, told: list[float]):
    for _ in range(20):
        loop.now += LATE_AFTER_S
        loop.go(0)
    assert told == []


def test_after_its_stop_nobody_is_told_until_it_begins_anew(loop: VirtualLoop, lag: LoopLag, told: list[float]):
    lag.stop()
    loop.now += 60
    lag.check()
    lag.watch()
    assert (told, loop.timers) == ([], 0)
    lag.restart()
    lag.watch()
    loop.now += 60
    lag.check()
    assert len(told) == 1
