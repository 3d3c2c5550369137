"""When it is looked for a verdict, and what of it is logged."""

import asyncio
import logging

import pytest

from lighthouse_protocol.rules.stall import Kind, StallVerdict
from lighthouse_runtime.timing.timers import StallWatch
from tests.virtual_loop import VirtualLoop

LOG = logging.getLogger("stalls")


class Scene:
    """Nothing has moved since `moved_at`; a verdict is due after 60 s. Nobody is there: None."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.moved_at: float | None = loop.now
        self.text = "1 behind in loader"
        self.looks = 0
        self.told: list[str] = []

    def judge(self, now: float) -> StallVerdict | None:
        self.looks += 1
        left_s = self.left_s(now)
        return None if left_s is None or left_s >= 0 else StallVerdict(Kind.BEHIND, (), self.text, 60 - left_s)

    def hear(self, verdict: StallVerdict | None) -> None:
        self.told.append(verdict.text if verdict is not None else "moves")

    def left_s(self, now: float) -> float | None:
        return None if self.moved_at is None else self.moved_at + 60 - now


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO, "stalls")
    scene = Scene(VirtualLoop())
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: scene.loop)
    return scene


@pytest.fixture
def watch(scene: Scene) -> StallWatch:
    return StallWatch(scene.loop, LOG, "j", scene.judge, scene.left_s, 60.0, scene.hear)


def test_says_it_once_and_when_it_is_over(scene: Scene, watch: StallWatch, caplog: pytest.LogCaptureFixture):
    watch.wake()
    scene.loop.go(59)
    assert caplog.messages == []
    scene.loop.go(120)
    assert caplog.messages == ["nothing has moved for 60 s: 1 behind in loader"]
    assert watch.verdict is not None
    scene.text = "1 behind in loader; no beat from 1"
    scene.loop.go(2)
    assert caplog.messages[1:] == ["nothing has moved for 179 s: 1 behind in loader; no beat from 1"]
    scene.moved_at = scene.loop.now
    scene.loop.go(2)
    assert caplog.messages[2:] == ["progress resumed"]
    assert scene.told == ["1 behind in loader", "1 behind in loader; no beat from 1", "moves"]


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
