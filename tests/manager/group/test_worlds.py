"""Ranks that take it hear how the world is; a group that stays incomplete is in the log."""

import asyncio
import logging

import pytest

from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.messages.session import WatchRequest
from manager.group import worlds
from manager.group.watches import Watch, WatchTable
from manager.group.worlds import Worlds

WORLD = World(8, 1, 8, 8, 1, ("c",))


class Heard:
    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def end(self, error: object = None) -> None:
        raise AssertionError(error)


async def test_every_watch_is_told_as_long_as_it_is_open():
    watches, ranks = WatchTable(), [Heard(), Heard()]
    told = Worlds(watches, asyncio.get_running_loop())

    def open_watch(rank: int) -> None:
        watch = Watch(ranks[rank], WatchRequest(rank, f"w{rank}"), is_here=False)
        watches.add(rank, watch)
        told.opened(watch)

    open_watch(0)
    told.tell(WORLD)
    open_watch(1)
    assert [rank.messages for rank in ranks] == [[WORLD], [WORLD]], "a later watch is told what is known"
    watches.remove(0)
    told.tell(World(9, 1))
    assert [len(rank.messages) for rank in ranks] == [1, 2]


async def test_the_log_says_who_asks_to_come_in_once(caplog: pytest.LogCaptureFixture):
    told = Worlds(WatchTable(), asyncio.get_running_loop())
    with caplog.at_level(logging.INFO):
        for world in (WORLD, World(7, 1, peers_pending=1, pending=("c",)), World(16, 2)):
            told.tell(world)
    assert caplog.messages == ["ask to come in: c"]


async def test_what_is_missing_is_logged_once_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worlds, "INCOMPLETE_LOGGED_AFTER_S", 0.01)
    told = Worlds(WatchTable(), asyncio.get_running_loop())
    with caplog.at_level(logging.INFO):
        told.look("a has rank 0 of 2; missing: 1")
        told.look("")
        await asyncio.sleep(0.05)
        assert caplog.messages == [], "its ranks came one after the other"
        told.look("a has rank 1 of 2; missing: 0")
        await asyncio.sleep(0.05)
        told.look("")
    told.close()
    assert caplog.messages == [
        "a has rank 1 of 2; missing: 0; a replica group takes part only when all its ranks are there",
        "no rank is waited for any more",
    ]
