import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from lighthouse.server import webhook
from lighthouse.server.webhook import PreemptionWebhook
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_runtime.net.address import is_http_url
from lighthouse_runtime.web import webhook as posting


class Server:
    def __init__(self) -> None:
        self.statuses: list[int] = []  # of the next answers; then 200
        self.bodies: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 0:
            await asyncio.Event().wait()
        if status == 200:
            self.bodies.put_nowait(body)
        return web.Response(status=status)


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    server, app = Server(), web.Application()
    app.router.add_post("/secret-path", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/secret-path"
    yield server
    await runner.cleanup()


def notice(reason: str = "spot") -> PreemptionNotice:
    return PreemptionNotice("aws", reason, "h", time.time() + 100)


async def test_a_notice_is_repeated_until_it_is_taken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "ANSWERED_WITHIN_S", 0.2)
    server.statuses = [500, 0, 302]
    hook, first = PreemptionWebhook(server.url), notice()
    hook.post("j", "a", first)
    hook.post("j", "a", notice("again"))
    async with asyncio.timeout(60):
        bodies = [await server.bodies.get(), await server.bodies.get()]
    bodies.sort(key=lambda body: str(body["reason"]))
    assert [body["reason"] for body in bodies] == ["again", "spot"]
    left_s = bodies[1].pop("left_s")
    assert isinstance(left_s, float)
    assert 30 < left_s <= 100
    expected = {"job": "j", "replica_id": "a", "source": "aws", "reason": "spot", "host": "h", "is_advice": False}
    assert bodies[1] == {**expected, "ends_at_unix_s": first.ends_at_unix_s}
    await hook.close()
    assert server.bodies.empty()


async def test_a_url_that_never_takes_it_is_logged_without_its_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "POSTED_WITHIN_S", 0.5)
    server.statuses = [500] * 1000
    hook = PreemptionWebhook(server.url)
    hook.post("j", "a", notice())
    async with asyncio.timeout(60):
        await asyncio.gather(*hook._tasks)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "was not posted" in record.getMessage()
    assert "status 500" in record.getMessage()
    assert "secret-path" not in record.getMessage()


async def test_notices_of_a_thousand_groups_are_posted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[object] = []
    is_open = most = 0

    async def post(url: str, document: dict[str, object]) -> str:
        nonlocal is_open, most
        is_open += 1
        most = max(most, is_open)
        await asyncio.sleep(0)
        is_open -= 1
        posted.append(document["replica_id"])
        return ""

    monkeypatch.setattr(webhook, "post_json", post)
    hook = PreemptionWebhook("http://127.0.0.1:1/")
    for number in range(1000):
        hook.post("j", f"g{number}", notice())
    await asyncio.gather(*hook._tasks)
    assert (len(set(posted)), most) == (1000, webhook.MAX_OPEN)


async def test_pending_requests_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(webhook, "MAX_PENDING", 2)
    hook = PreemptionWebhook("http://127.0.0.1:1/")
    for number in range(3):
        hook.post("j", "a", notice(str(number)))
    assert "2 requests are pending" in caplog.text
    await hook.close()


def test_a_url_is_of_http_and_has_a_host() -> None:
    assert all(map(is_http_url, ("http://h/x", "https://h:8/")))
    assert not any(map(is_http_url, ("ftp://h/", "h", "http://", "http://[")))
