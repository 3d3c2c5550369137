"""What the manager's link says of the end of a session: one that the group has asked for is no loss."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator

import pytest

from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import Goodbye, Hello, Leave, ToManager, Welcome
from lighthouse_protocol.refusals import NotPermitted
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.timing import pacing
from manager.group import link
from manager.group.link import LighthouseLink, UnreachableLog
from tests.lighthouse_runtime.stream_server import StreamServer, running
from tests.processes import LOCALHOST, PATIENCE_S

HELLO = Hello(Participant("a", "1"), secret="known to this manager alone, of this test")


@pytest.fixture
async def server() -> AsyncIterator[StreamServer]:
    async with running() as server:
        yield server


class Group:
    """It says hello on each session; `says` is its answer to the first welcome. Whatever else it hears ends the
    session, in good order, from the lighthouse's side."""

    def __init__(self, server: StreamServer, says: Leave | None) -> None:
        address = f"{LOCALHOST}:{server.port}"
        self.link = LighthouseLink(
            lambda: AsyncLighthouseClient(address), LeaderSearch((Address(LOCALHOST, server.port),))
        )
        self.sessions = 0
        self.moves: list[bool] = []
        self._server = server
        self._says = says

    def opened(self) -> None:
        self.sessions += 1
        self.link.send(HELLO)

    def received(self, message: ToManager) -> None:
        if isinstance(message, Welcome) and self.sessions == 1 and self._says is not None:
            self.link.send(self._says)
        elif isinstance(message, Goodbye) or self.sessions == 1:
            self._server.senders[-1].end()

    async def run(self) -> None:
        await self.link.run(self.opened, self.received, self.moves.append)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name == link.log.name]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


async def test_who_has_left_in_good_order_has_lost_nobody(server: StreamServer, caplog: pytest.LogCaptureFixture):
    group = Group(server, Leave("done"))
    await asyncio.wait_for(group.run(), PATIENCE_S)
    assert warnings(caplog) == []
    assert server.heard == [HELLO, Leave("done")]
    assert (group.link.is_reachable, group.link.error) == (False, "this replica group has left its job")


async def test_who_is_let_go_and_has_not_asked_for_it_says_so_and_comes_back(
    server: StreamServer, caplog: pytest.LogCaptureFixture
):
    group = Group(server, None)
    running = asyncio.create_task(group.run())
    async with asyncio.timeout(PATIENCE_S):
        while server.heard != [HELLO, HELLO]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait((running,))
    assert warnings(caplog) == [f"lighthouse unreachable: {group.link.address} closed the session"]


async def test_a_session_that_moves_is_told_from_one_that_ends(server: StreamServer):
    group = Group(server, None)
    running = asyncio.create_task(
        group.link.run(group.opened, lambda _: group.link.connect_second("test"), group.moves.append)
    )
    async with asyncio.timeout(PATIENCE_S):
        while group.sessions < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert group.moves[0]
    running.cancel()
    await asyncio.wait((running,))
    assert not group.moves[-1]


class Refusing(AsyncLighthouseClient):
    async def connect(self, timeout_s: float) -> None:
        raise NotPermitted("the token has changed")


async def test_a_second_connection_is_tried_again_after_a_refusal_and_after_a_defect(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(pacing, "MAX_BACKOFF_S", 0.001)
    where = Address(LOCALHOST, server.port)
    kinds = iter([AsyncLighthouseClient, {}.__getitem__, Refusing, AsyncLighthouseClient])
    moving = LighthouseLink(lambda: next(kinds)(str(where)), LeaderSearch((where,)))
    moves: list[bool] = []
    running = asyncio.create_task(moving.run(lambda: moving.send(HELLO), lambda _: None, moves.append))
    async with asyncio.timeout(PATIENCE_S):
        while not moves:
            moving.connect_second("test")
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait((running,))
    assert moves[0]
    assert "a defect has ended the attempt to open a second connection" in caplog.text


async def test_what_could_not_connect_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """A lighthouse may be away for days."""
    monkeypatch.setattr(pacing, "MAX_BACKOFF_S", 0.001)
    nowhere, enough = Address(LOCALHOST, 1), asyncio.Event()
    clients: list[weakref.ref[AsyncLighthouseClient]] = []

    def connect() -> AsyncLighthouseClient:
        client = AsyncLighthouseClient(str(nowhere))
        clients.append(weakref.ref(client))
        if len(clients) == 20:
            enough.set()
        return client

    running = asyncio.create_task(
        LighthouseLink(connect, LeaderSearch((nowhere,))).run(lambda: None, lambda _: None, lambda _: None)
    )
    await asyncio.wait_for(enough.wait(), PATIENCE_S)
    gc.collect()
    kept = sum(client() is not None for client in clients)
    running.cancel()
    await asyncio.wait((running,))
    assert kept <= 3, "the newest ones"


def test_an_absence_is_said_at_once_and_then_less_and_less_often() -> None:
    absence = UnreachableLog()
    assert absence.next_line("refused", 100.0) == "refused"
    said = [now for now in range(101, 400) if absence.next_line("refused", float(now))]
    assert said == [110, 130, 170, 230, 290, 350]
    assert absence.next_line("another reason", 400.0) == "another reason"
    assert absence.next_line("another reason", 460.0) == "another reason; for 360 s now"
    absence.clear_error()
    assert absence.next_line("refused", 500.0) == "refused"


def test_the_reasons_of_several_lighthouses_are_said_no_more_often_than_one() -> None:
    absence = UnreachableLog()
    said = [
        line
        for second in range(300)
        for error in ("a: refused", f"b: no store, for {second} s", "c: no route")
        if (line := absence.next_line(error, 100.0 + second))
    ]
    assert said[:3] == ["a: refused", "b: no store, for 0 s", "c: no route"]
    assert said[3:] == [f"a: refused; for {at} s now" for at in (10, 30, 70, 130, 190, 250)]


def test_reasons_that_never_repeat_are_said_less_and_less_often_too() -> None:
    absence = UnreachableLog()
    said = [now for now in range(10_000) if absence.next_line(f"request {now} failed", now / 10)]
    assert len(said) < 100
