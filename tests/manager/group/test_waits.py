"""Ranks that wait for a quorum are told what for, once that lasts; so is the log."""

import logging

import pytest

from lighthouse_protocol.messages.session import Waiting
from manager.group.driver import RankNotices, Watches
from tests.manager.recorders import Heard, watch
from tests.virtual_loop import VirtualLoop


class Manager:
    def __init__(self) -> None:
        self.loop, self.waiting_for = VirtualLoop(), "b"
        self.watches = Watches()
        self.waits = RankNotices(self.loop, self.watches, lambda: self.waiting_for)
        self.rank = self.open(1)

    def open(self, number: int) -> Heard:
        heard = Heard()
        self.watches[number] = watch(peer=heard)
        self.waits.send_notices(watch(peer=heard))
        return heard


@pytest.fixture
def manager(caplog: pytest.LogCaptureFixture) -> Manager:
    caplog.set_level(logging.INFO)
    return Manager()


@pytest.mark.parametrize("has_pauses", [True, False])
def test_rounds_are_no_wait(manager: Manager, caplog: pytest.LogCaptureFixture, has_pauses: bool):
    """Without a pause one rank asks before the other one has its answer: some request always waits."""
    for _ in range(100):
        manager.waits.set_waiting(True)
        manager.loop.go(0.9)
        manager.waits.end_wait()
        if has_pauses:
            manager.waits.set_waiting(False)
    assert (manager.rank.messages, caplog.messages, manager.loop.timers) == ([], [], int(not has_pauses))


def test_a_wait_is_told_to_the_ranks_and_then_to_the_log(manager: Manager, caplog: pytest.LogCaptureFixture):
    manager.waits.set_waiting(True)
    manager.loop.go(1)
    assert manager.rank.messages == [Waiting("b")]
    assert manager.open(2).messages == [Waiting("b")], "a watch that is opened later is told, too"
    manager.loop.go(4.5)
    manager.waiting_for = "c"
    manager.loop.go(20)
    manager.waits.end_wait()
    manager.waits.set_waiting(False)
    assert manager.rank.messages == [Waiting("b"), Waiting("c"), Waiting("")]
    assert caplog.messages == [
        "no quorum for 5 s: waiting for b",
        "no quorum for 15 s: waiting for c",
        "there is a quorum, after 26 s",
    ]
    assert manager.loop.timers == 0


def test_a_request_that_is_asked_again_goes_on_waiting(manager: Manager, caplog: pytest.LogCaptureFixture):
    manager.waits.set_waiting(True)
    manager.loop.go(3)
    manager.waits.set_waiting(False)
    manager.loop.go(0.5)
    manager.waits.set_waiting(True)
    manager.loop.go(2)
    assert caplog.messages == ["no quorum for 6 s: waiting for b"]


def test_a_watch_that_has_ended_is_told_nothing(manager: Manager):
    del manager.watches[1]
    manager.waits.set_waiting(True)
    manager.loop.go(1)
    manager.waits.close()
    assert (manager.rank.messages, manager.loop.timers) == ([], 0)
