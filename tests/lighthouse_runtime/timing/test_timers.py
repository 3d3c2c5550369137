"""Timers that notice a loop that was held up, a stall, and a state that lasts."""

import asyncio
import logging

import pytest

from lighthouse_protocol.rules.stall import Kind, StallVerdict
from lighthouse_runtime.timing.timers import CHECKED_EVERY_S, LATE_AFTER_S, DelayedAlert, LoopLag, StallWatch
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


LOG = logging.getLogger("stalls")


class Scene:
    """Nothing has moved since `moved_at`; a verdict is due after 60 s. Nobody is there: None."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.moved_at: float | None = loop.now
        self.text = "1 behind in loader"
        self.looks = 0
        self.told: list[str] = []

    def judge_ranks(self, now: float) -> StallVerdict | None:
        self.looks += 1
        left_s = self.verdict_in_s(now)
        return None if left_s is None or left_s >= 0 else StallVerdict(Kind.BEHIND, (), self.text, 60 - left_s)

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        self.told.append(verdict.text if verdict is not None else "moves")

    def verdict_in_s(self, now: float) -> float | None:
        return None if self.moved_at is None else self.moved_at + 60 - now


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO, "stalls")
    scene = Scene(VirtualLoop())
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: scene.loop)
    return scene


@pytest.fixture
def watch(scene: Scene) -> StallWatch:
    return StallWatch(scene.loop, LOG, "j", scene, 60.0)


def test_says_it_once_and_when_it_is_over(scene: Scene, watch: StallWatch, caplog: pytest.LogCaptureFixture):
    watch.wake()
    scene.loop.go(59)
    assert caplog.messages == []
    scene.loop.go(120)
    assert caplog.messages == ["nothing has moved for 60 s: 1 behind in loader"]
    assert watch.verdict is not None
    scene.text = "1 behind in loader; no heartbeat from 1"
    scene.loop.go(2)
    assert caplog.messages[1:] == ["nothing has moved for 179 s: 1 behind in loader; no heartbeat from 1"]
    scene.moved_at = scene.loop.now
    scene.loop.go(2)
    assert caplog.messages[2:] == ["progress resumed"]
    assert scene.told == ["1 behind in loader", "1 behind in loader; no heartbeat from 1", "moves"]


def test_what_moves_costs_a_look_a_minute(scene: Scene, watch: StallWatch, caplog: pytest.LogCaptureFixture):
    for _ in range(3600):
        watch.wake()
        scene.loop.go(1)
        scene.moved_at = scene.loop.now
    assert caplog.messages == []
    assert scene.looks <= 2 * 3600 / 60


def test_ends_when_nobody_is_there_and_begins_again(scene: Scene, watch: StallWatch):
    watch.wake()
    scene.moved_at = None
    scene.loop.go(100)
    assert scene.loop.timers == 0
    scene.moved_at = scene.loop.now
    watch.wake()
    assert scene.loop.timers == 1
    watch.close()
    assert scene.loop.timers == 0


AFTER_S = 0.02


async def said(*texts: str, apart_s: float) -> list[str]:
    heard: list[str] = []
    lasting = DelayedAlert(asyncio.get_running_loop(), heard.append, AFTER_S)
    for text in texts:
        lasting.set(text)
        await asyncio.sleep(apart_s)
    lasting.close()
    return heard


async def test_what_changes_too_soon_is_not_said():
    assert await said("a", "b", "", apart_s=0) == []


async def test_what_lasts_is_said_once_and_when_it_is_over():
    assert await said("a", "a", "b", "", "", apart_s=4 * AFTER_S) == ["a", "b", ""]


async def test_a_new_start_is_said_anew():
    assert await said("a", "", "a", apart_s=4 * AFTER_S) == ["a", "", "a"]
