"""HTTP connections that ask for nothing, and too many of them: cut, so that the others are served."""

import asyncio
import os
from collections.abc import AsyncIterator

import aiohttp
import pytest

from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.security.access import LocalOperatorAccess
from lighthouse_runtime.web import server
from lighthouse_runtime.web.control import HttpGuard
from lighthouse_runtime.web.server import HttpServer, HttpSide

PATIENCE_S = 30.0
ASKS = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a daemon that waits a short time for a request."""
    monkeypatch.setattr(server, "HEADERS_WITHIN_S", 0.3)
    http = HttpServer(HttpSide(lambda: True, lambda: (b"", "text/plain"), dict, HttpGuard(LocalOperatorAccess())))
    yield await http.start("127.0.0.1:0")
    await http.stop()


@pytest.mark.parametrize("begins", [b"", ASKS, ASKS + b"X-Slow: 1\r\n"])
async def test_a_connection_without_a_whole_request_is_closed(port: int, begins: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begins)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


async def test_a_header_that_drips_is_too_late_as_well(port: int):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASKS)
    gone = asyncio.create_task(reader.read())
    async with asyncio.timeout(PATIENCE_S):
        while not gone.done():
            writer.write(b"X-Slow: 1\r\n")
            await asyncio.wait((gone,), timeout=0.05)
    writer.close()


async def test_beyond_the_limit_the_oldest_is_cut_and_the_newest_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    http = HttpServer(HttpSide(lambda: True, lambda: (b"", "text/plain"), dict, HttpGuard(LocalOperatorAccess())))
    port = await http.start("127.0.0.1:0")
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/livez") as answer:
        assert await answer.text() == "ok\n"
        async with asyncio.timeout(PATIENCE_S):
            assert await idle[0][0].read() == b""
        assert not any(reader.at_eof() for reader, _ in idle[1:])
    assert "3 HTTP connections are open: closing one of 127.0.0.1" in caplog.text
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()
    await http.stop()


async def test_a_port_that_is_taken_is_refused_with_its_process(port: int):
    other = HttpServer(HttpSide(lambda: True, lambda: (b"", "text/plain"), dict, HttpGuard(LocalOperatorAccess())))
    with pytest.raises(InvalidRequest) as refused:
        await other.start(f"127.0.0.1:{port}")
    who = f"the port is in use by process {os.getpid()} ("
    assert str(refused.value).startswith(f"--http: cannot listen on 127.0.0.1:{port}: {who}")
