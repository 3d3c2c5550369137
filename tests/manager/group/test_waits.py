"""Ranks that wait for a quorum are told what for, once that lasts; so is the log."""

import asyncio
import logging

import pytest

from lighthouse_protocol.messages.session import Waiting
from lighthouse_protocol.pb.documented import manager_pb2
from lighthouse_protocol.wire.streams import WATCH_RESPONSES
from manager.group.waits import Waits
from tests.virtual_loop import VirtualLoop


class Heard:
    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: manager_pb2.WatchResponse) -> None:
        self.messages.append(WATCH_RESPONSES.read(message))


class Manager:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.waiting_for = loop, "b"
        self.waits = Waits(lambda: self.waiting_for)
        self.rank = self.watch(1)

    def watch(self, number: int) -> Heard:
        heard = Heard()
        self.waits.opened(number, heard)  # type: ignore[arg-type]
        return heard

    def look(self, is_waiting: bool) -> None:
        self.waits.look(is_waiting=is_waiting)

    def answer(self) -> None:
        self.waits.answered()
        self.look(False)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Manager:
    caplog.set_level(logging.INFO)
    loop = VirtualLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return Manager(loop)


def test_rounds_tell_nothing(manager: Manager, caplog: pytest.LogCaptureFixture):
    for _ in range(100):
        manager.look(True)
        manager.loop.go(0.9)
        manager.answer()
    assert (manager.rank.messages, caplog.messages, manager.loop.timers) == ([], [], 0)


def test_steps_without_a_pause_between_them_are_no_wait(manager: Manager, caplog: pytest.LogCaptureFixture):
    """One rank asks before the other one has its answer: some request always waits."""
    for _ in range(100):
        manager.look(True)
        manager.loop.go(0.9)
        manager.waits.answered()
    manager.look(True)
    assert (manager.rank.messages, caplog.messages) == ([], [])


def test_a_wait_is_told_to_the_ranks_and_then_to_the_log(manager: Manager, caplog: pytest.LogCaptureFixture):
    manager.look(True)
    manager.loop.go(1)
    assert manager.rank.messages == [Waiting("b")]
    assert manager.watch(2).messages == [Waiting("b")], "who comes later is told, too"
    manager.loop.go(4.5)
    manager.waiting_for = "c"
    manager.loop.go(20)
    manager.answer()
    assert manager.rank.messages == [Waiting("b"), Waiting("c"), Waiting("")]
    assert caplog.messages == [
        "no quorum for 5 s: waiting for b",
        "no quorum for 15 s: waiting for c",
        "there is a quorum, after 26 s",
    ]
    assert manager.loop.timers == 0


def test_a_request_that_is_asked_again_goes_on_waiting(manager: Manager, caplog: pytest.LogCaptureFixture):
    manager.look(True)
    manager.loop.go(3)
    manager.look(False)
    manager.loop.go(0.5)
    manager.look(True)
    manager.loop.go(2)
    assert caplog.messages == ["no quorum for 6 s: waiting for b"]


def test_who_has_gone_is_told_nothing(manager: Manager):
    manager.waits.ended(1)
    manager.look(True)
    manager.loop.go(1)
    manager.waits.close()
    assert (manager.rank.messages, manager.loop.timers) == ([], 0)
