"""The status as server-sent events, by real connections: who is sent what, what a slow client costs, how it ends."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from lighthouse_protocol.messages.status import MemberState, TimelineEntry, TimelineKind
from lighthouse_runtime.security.access import LoopbackAccess
from lighthouse_runtime.web import server
from lighthouse_runtime.web.control import HttpGuard
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide, StatusFeed, to_json
from tests.lighthouse.statuses import job, member, status

PATIENCE_S = 30.0


@dataclass
class Daemon:
    """`status` is counted up with every snapshot; `padding` makes it large."""

    snapshots: int = 0
    padding: str = ""
    http: HttpServer = field(init=False)
    port: int = 0

    def __post_init__(self) -> None:
        page = Document(b"<p>page</p>", "text/html", {})
        self.http = HttpServer(
            HttpSide(lambda: True, lambda: (b"", "text/plain"), self.status, HttpGuard(LoopbackAccess()), page)
        )

    def status(self) -> object:
        self.snapshots += 1
        return {"number": self.snapshots, "padding": self.padding}

    @property
    def feed(self) -> StatusFeed:
        return self.http._feed

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    daemon = Daemon()
    daemon.feed._every_s = 0.02
    daemon.port = await daemon.http.start("127.0.0.1:0")
    yield daemon
    await daemon.http.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=4 * 1024 * 1024) as session:
        yield session


async def event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next one, whole."""
    while not (line := await response.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line[6:])


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_client_is_sent_one_snapshot_after_the_other(
    daemon: Daemon, client: aiohttp.ClientSession, encoding: str
):
    async with client.get(daemon.url("/events"), headers={"Accept-Encoding": encoding}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers.get("Content-Encoding", "identity") == encoding
        assert response.headers["Cache-Control"] == "no-store"
        assert [(await event(response))["number"] for _ in range(3)] == [1, 2, 3]


async def test_who_comes_later_is_sent_the_same_compressed_bytes(daemon: Daemon, client: aiohttp.ClientSession):
    async with client.get(daemon.url("/events")) as first:
        await until(lambda: daemon.snapshots > 5)
        async with client.get(daemon.url("/events")) as second:
            seen = await event(second)
            assert seen["number"] >= 5
            while (mine := await event(first))["number"] < seen["number"]:
                pass
            assert mine == seen


async def test_no_snapshot_is_made_while_nobody_listens(daemon: Daemon, client: aiohttp.ClientSession):
    await asyncio.sleep(0.1)
    assert daemon.snapshots == 0
    async with client.get(daemon.url("/events")) as response:
        await event(response)
    await until(lambda: daemon.feed.clients == 0)
    made = daemon.snapshots
    await asyncio.sleep(0.2)
    assert daemon.snapshots == made


async def test_a_client_that_reads_nothing_holds_one_snapshot_and_is_cut_off(
    daemon: Daemon, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "WRITTEN_WITHIN_S", 1.0)
    daemon.padding = "x" * 8_000_000  # more than the kernel takes
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    idle.connect(("127.0.0.1", daemon.port))
    idle.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await until(lambda: daemon.feed.clients == 1)
    [connection] = daemon.feed._clients
    transport = connection.transport
    assert transport is not None
    largest = 0

    def is_cut_off() -> bool:
        nonlocal largest
        largest = max(largest, 0 if transport.is_closing() else transport.get_write_buffer_size())
        return daemon.feed.clients == 0

    with idle:
        await until(is_cut_off)
    assert 1_000_000 < largest < 10_000_000, "one snapshot at most"


async def test_where_as_many_listen_as_may_one_more_takes_the_place_of_the_oldest(
    daemon: Daemon, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(server, "MAX_CLIENTS", 2)
    async with client.get(daemon.url("/events")) as first, client.get(daemon.url("/events")) as second:
        await event(first)
        await event(second)
        async with client.get(daemon.url("/events")) as third:
            await event(third)
            await event(second)
            with pytest.raises(aiohttp.ClientError):
                while await first.content.readline():
                    pass
    assert "2 browsers are connected: disconnecting one at 127.0.0.1" in caplog.text


async def test_one_that_does_not_read_goes_before_an_older_one_that_does(
    daemon: Daemon, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "MAX_CLIENTS", 2)
    async with client.get(daemon.url("/events")) as reader:
        await event(reader)
        daemon.padding = "x" * 8_000_000  # more than the kernel takes
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", daemon.port))
            deaf.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: daemon.feed.clients == 2 and list(daemon.feed._clients)[1].writing_paused)
            async with client.get(daemon.url("/events")) as third:
                await event(third)
                await event(reader)
    assert daemon.feed.clients <= 2


async def test_a_stop_ends_every_stream_at_once(daemon: Daemon, client: aiohttp.ClientSession):
    async with client.get(daemon.url("/events"), headers={"Accept-Encoding": "identity"}) as response:
        await event(response)
        with socket.create_connection(("127.0.0.1", daemon.port)) as idle:
            idle.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: daemon.feed.clients == 2)
            async with asyncio.timeout(PATIENCE_S):
                await daemon.http.stop()
        await until(lambda: daemon.feed.clients == 0)
        while await response.content.readline():
            pass
    assert daemon.feed._pump is None


async def test_snapshots_that_cost_much_come_rarely(daemon: Daemon, client: aiohttp.ClientSession):
    now = asyncio.get_running_loop().time
    made_at: list[float] = []

    def slow() -> object:
        made_at.append(now())
        ends_at = now() + 0.01
        while now() < ends_at:
            pass
        return {}

    daemon.feed._status = slow
    async with client.get(daemon.url("/events")) as response:
        for _ in range(3):
            await event(response)
    assert made_at[2] - made_at[0] >= 2 * 0.01 / server.FEED_SHARE


async def test_a_status_that_fails_is_said_in_the_log_and_asked_for_again(
    daemon: Daemon, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
):
    good = daemon.feed._status

    def once() -> object:
        daemon.feed._status = good
        raise RuntimeError("a defect")

    daemon.feed._status = once
    async with client.get(daemon.url("/events")) as response:
        assert (await event(response))["number"] == 1
    assert "cannot build the status" in caplog.text


async def test_a_large_status_is_compressed_for_whoever_takes_that(daemon: Daemon, client: aiohttp.ClientSession):
    daemon.padding = "x" * 100_000
    for encoding, shown, is_small in (("gzip", "gzip", True), ("identity", None, False)):
        async with client.get(daemon.url("/status"), headers={"Accept-Encoding": encoding}) as response:
            assert response.headers.get("Content-Encoding") == shown
            assert (int(response.headers["Content-Length"]) < 1000) == is_small
            assert (await response.json())["padding"] == daemon.padding


def test_statuses_become_objects():
    told = status(job(member("a", MemberState.EXPIRED)))
    entry = TimelineEntry(1.5, TimelineKind.LOST, ("a",), 2, "<b>")
    shown = json.loads(to_json({"status": told, "entry": entry}))
    assert shown["status"]["jobs"][0]["members"][0]["state"] == "expired"
    assert shown["entry"] == {"at_unix_s": 1.5, "kind": "lost", "replica_ids": ["a"], "more": 2, "text": "<b>"}
    with pytest.raises(TypeError):
        to_json(object())
