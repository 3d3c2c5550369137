"""Who may act through the page, by real connections: each thing that a browser must prove, and what it is told else."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from lighthouse_protocol.limits import TOKEN_METADATA_KEY
from lighthouse_protocol.refusals import UnknownName, Unreachable
from lighthouse_runtime.server import rpc_handler
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.rpc_handler import Call
from lighthouse_runtime.web.control import CSRF_HEADER, HttpControl, KillOrder
from lighthouse_runtime.web.server import HttpServer, HttpSide

A = {"job": "default", "replica_id": "a", "reason": "tried"}


@dataclass
class Daemon:
    policy: ControlPolicy = field(default_factory=ControlPolicy)
    killed: list[KillOrder] = field(default_factory=list)
    error: Exception | None = None
    port: int = 0

    async def kill(self, order: KillOrder, call: Call) -> None:
        self.policy.check(call)
        if self.error is not None:
            raise self.error
        self.killed.append(order)

    def incident(self, name: str) -> object:
        if name != "i1":
            raise UnknownName(f"incident: there is no {name!r}")
        return {"id": "i1", "evidence": []}

    async def start(self, client: aiohttp.ClientSession) -> None:
        control = HttpControl(self.policy, self.kill, ("coordinator.example",))
        self.http = HttpServer(HttpSide(lambda: True, lambda: (b"", ""), dict, control=control, incident=self.incident))
        self.port = await self.http.start("127.0.0.1:0")
        self.client = client

    async def get(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.client.get(f"http://127.0.0.1:{self.port}{path}", headers=headers) as response:
            return response.status, await response.json()

    async def csrf(self) -> str:
        return (await self.get("/control"))[1]["csrf"]

    async def post(self, body: object = A, **headers: str) -> tuple[int, dict[str, Any]]:
        """With all that is to be proven, as far as `headers` say nothing else; an empty one is left out."""
        given = {"Host": f"127.0.0.1:{self.port}", "X-CSRF-Token": await self.csrf()}
        given |= {"Origin": f"http://127.0.0.1:{self.port}", "Sec-Fetch-Site": "same-origin"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in given.items() if value}
        async with self.client.post(f"http://127.0.0.1:{self.port}/kill", json=body, headers=sent) as response:
            return response.status, await response.json()


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    daemon = Daemon()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
        await daemon.start(client)
        yield daemon
        await daemon.http.stop()


@pytest.fixture
def from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is local."""
    monkeypatch.setattr(rpc_handler.Call, "is_local", property(lambda call: False))


@pytest.mark.parametrize("headers", [{}, {"Origin": "", "Sec_Fetch_Site": ""}], ids=["its page", "a program"])
async def test_who_proves_it_kills(daemon: Daemon, headers: dict[str, str]):
    """A program without a page has the token alone."""
    assert await daemon.post(**headers) == (200, {"job": "default", "replica_id": "a", "killed": True})
    assert daemon.killed == [KillOrder("default", "a", "tried")]


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"X_CSRF_Token": ""}, 403, "X-CSRF-Token: is not this process's; reload the page"),
        ({"X_CSRF_Token": "gu\u00e9ssed"}, 403, "X-CSRF-Token"),
        ({"Origin": "http://evil.example"}, 403, "a page of http://evil.example may not act here"),
        ({"Origin": "null"}, 403, "a page of null may not"),
        ({"Origin": "http://127.0.0.1:1"}, 403, "a page of http://127.0.0.1:1 may not"),
        ({"Origin": "", "Sec_Fetch_Site": "cross-site"}, 403, "a page of cross-site may not"),
        ({"Content_Type": "text/plain"}, 400, "send application/json"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403, "does not know itself as 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:29511", "Origin": ""}, 403, "does not know itself"),
        ({"Host": "%00", "Origin": ""}, 403, "Host"),
        ({"X_Forwarded_For": "10.0.0.1"}, 403, "control from a proxy is refused"),
        ({"Via": "1.1 proxy"}, 403, "control from a proxy is refused"),
    ],
)
async def test_what_is_not_proven_is_refused_with_the_reason(
    daemon: Daemon, headers: dict[str, str], status: int, words: str
):
    answered, body = await daemon.post(**headers)
    assert (answered, daemon.killed) == (status, [])
    assert words in body["error"]


@pytest.mark.parametrize("host", ["localhost", "[::1]", "10.1.2.3", "coordinator.example", "Coordinator.Example."])
async def test_the_names_that_it_is_known_by(daemon: Daemon, host: str):
    where = f"{host}:{daemon.port}"
    assert (await daemon.post(Host=where, Origin=f"http://{where}"))[0] == 200


@pytest.mark.parametrize("body", [[], "a", {"replica_id": 7}, {"replica_id": "a", "reason": "\ud800"}])
async def test_a_body_that_is_no_order(daemon: Daemon, body: object):
    status, answer = await daemon.post(body)
    assert (status, daemon.killed) == (400, [])
    assert answer["error"].startswith("body: ")


@pytest.mark.parametrize(("body", "status"), [(b"[" * 4_000, 400), (b'"' + b"x" * 20_000 + b'"', 413)])
async def test_a_body_that_is_deep_or_without_end(daemon: Daemon, body: bytes, status: int):
    headers = {"Content-Type": "application/json", CSRF_HEADER: await daemon.csrf()}
    url = f"http://127.0.0.1:{daemon.port}/kill"
    async with daemon.client.post(url, data=body, headers=headers) as response:
        assert (response.status, daemon.killed) == (status, [])


@pytest.mark.parametrize(("error", "status"), [(UnknownName("replica_id: no live a"), 404), (Unreachable("gone"), 503)])
async def test_a_kill_that_fails_says_why(daemon: Daemon, error: Exception, status: int):
    daemon.error = error
    assert await daemon.post() == (status, {"error": str(error)})


async def test_the_page_is_told_whether_it_may_and_why_not(daemon: Daemon):
    assert (await daemon.get("/control"))[1] == {
        "may_kill": True,
        "takes_token": False,
        "why": "",
        "csrf": await daemon.csrf(),
    }
    _, told = await daemon.get("/control", Host="evil.example")
    assert (told["may_kill"], told["csrf"]) == (False, "")
    assert "does not know itself" in told["why"]


@pytest.mark.usefixtures("from_afar")
async def test_from_another_host_it_takes_the_control_token(daemon: Daemon):
    assert (await daemon.post())[0] == 403
    daemon.policy = daemon.http._side.control._policy = ControlPolicy("secret")
    _, told = await daemon.get("/control")
    assert (told["may_kill"], told["takes_token"]) == (False, True)
    assert "--control-token-file" in told["why"]
    assert (await daemon.post(**{TOKEN_METADATA_KEY: "wrong"}))[0] == 403
    assert (await daemon.post(**{TOKEN_METADATA_KEY: "secret"}))[0] == 200
    assert daemon.killed == [KillOrder("default", "a", "tried")]


@pytest.mark.usefixtures("from_afar")
async def test_from_another_host_where_anyone_may(daemon: Daemon):
    daemon.policy = daemon.http._side.control._policy = ControlPolicy(allow_remote=True)
    assert (await daemon.get("/control"))[1]["may_kill"]
    assert (await daemon.post())[0] == 200
    assert (await daemon.post(X_CSRF_Token="guessed"))[0] == 403


@pytest.mark.parametrize("path", ["/control", "/status", "/incidents/i1"])
async def test_nothing_may_be_read_by_a_foreign_page(daemon: Daemon, path: str):
    foreign = {"Origin": "http://evil.example"}
    async with daemon.client.get(f"http://127.0.0.1:{daemon.port}{path}", headers=foreign) as response:
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


async def test_an_incident_is_shown_to_whoever_may_act(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    assert await daemon.get("/incidents/i1") == (200, {"id": "i1", "evidence": []})
    assert (await daemon.get("/incidents/i2"))[0] == 404
    assert (await daemon.get("/incidents/i1", Host="evil.example"))[0] == 403
    monkeypatch.setattr(rpc_handler.Call, "is_local", property(lambda call: False))
    assert (await daemon.get("/incidents/i1"))[0] == 403
