"""Ranks that take it hear how the world is; a group that stays incomplete is in the log."""

import logging

import pytest

from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.messages.session import Waiting
from manager.group.driver import INCOMPLETE_LOGGED_AFTER_S, RankNotices, Watches
from tests.manager.recorders import Heard, watch
from tests.virtual_loop import VirtualLoop

WORLD = World(8, 1, 8, 8, 1, ("c",))


def test_every_watch_is_told_as_long_as_it_is_open():
    watches = Watches()
    worlds = RankNotices(VirtualLoop(), watches, str)
    ranks = [Heard(), Heard()]

    def open_watch(rank: int) -> None:
        opened = watch(rank, ranks[rank])
        watches[rank] = opened
        worlds.send_notices(opened)

    open_watch(0)
    worlds.update_world(WORLD)
    open_watch(1)
    assert [rank.messages for rank in ranks] == [[WORLD], [WORLD]], "a later one is told what is known"
    del watches[0]
    worlds.update_world(World(9, 1))
    assert [len(rank.messages) for rank in ranks] == [1, 2]


def test_the_log_says_who_asks_to_come_in_once(caplog: pytest.LogCaptureFixture):
    worlds = RankNotices(VirtualLoop(), Watches(), str)
    with caplog.at_level(logging.INFO):
        for world in (WORLD, World(7, 1, peers_pending=1, pending=("c",)), World(16, 2)):
            worlds.update_world(world)
    assert caplog.messages == ["waiting to join: c"]


def test_what_is_missing_is_logged_once_it_lasts(caplog: pytest.LogCaptureFixture):
    loop = VirtualLoop()
    watches, rank = Watches(), Heard()
    watches[0] = watch(0, rank)
    worlds = RankNotices(loop, watches, str)
    with caplog.at_level(logging.INFO):
        worlds.set_missing("a has rank 0 of 2; missing: 1")
        worlds.set_missing("")
        loop.go(2 * INCOMPLETE_LOGGED_AFTER_S)
        assert caplog.messages == [], "its ranks came one after the other"
        worlds.set_missing("a has rank 1 of 2; missing: 0")
        loop.go(2 * INCOMPLETE_LOGGED_AFTER_S)
        worlds.set_missing("")
    worlds.close()
    assert caplog.messages == [
        "a has rank 1 of 2; missing: 0; a replica group joins only when all its ranks are connected",
        "all ranks of the group are connected",
    ]
    assert rank.messages == [Waiting("a has rank 1 of 2; missing: 0")], "it waits for the others, and asks for nothing"
    assert loop.timers == 0
