"""Who may act through the page, by real connections: each thing that a browser must prove, and what it is told else."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import LimitReached, UnknownName, Unreachable
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security import access
from lighthouse_runtime.security.access import ANONYMOUS, Access, Audit, CredentialAccess, LocalOperatorAccess
from lighthouse_runtime.security.credentials import TokenFile, load_or_make
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.web import control
from lighthouse_runtime.web.control import CSRF_HEADER, Act, HttpControl, HttpGuard, Order
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide

A = {"job": "default", "replica_id": "a", "reason": "tried"}
ROUTES = ("kill", "drain", "stop", "resume", "stacks")


@dataclass
class Daemon:
    access: Access = field(default_factory=LocalOperatorAccess)
    acted: list[tuple[str, Order]] = field(default_factory=list)
    error: Exception | None = None
    port: int = 0

    def act(self, route: str) -> Act:
        async def act(order: Order, call: Call) -> Mapping[str, object]:
            if self.error is not None:
                raise self.error
            self.acted.append((route, order))
            return {"done": route}

        return act

    def incident(self, name: str, _: Call) -> object:
        if name != "i1":
            raise UnknownName(f"incident: there is no {name!r}")
        return {"id": "i1", "evidence": []}

    async def restart(self, access: Access) -> None:
        await self.http.stop()
        self.access = access
        await self.start(self.client)

    async def start(self, client: aiohttp.ClientSession) -> None:
        guard = HttpGuard(self.access, ("coordinator.example",))
        control = HttpControl(guard, {f"POST /{route}": self.act(route) for route in ROUTES})
        side = HttpSide(lambda: True, lambda: (b"", ""), dict, guard, control=control, incident=self.incident)
        self.http = HttpServer(dataclasses.replace(side, page=Document(b"", "text/html", {})))
        self.port = await self.http.start("127.0.0.1:0")
        self.client = client

    async def get(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.client.get(f"http://127.0.0.1:{self.port}{path}", headers=headers) as response:
            return response.status, await response.json()

    async def csrf(self) -> str:
        return (await self.get("/control"))[1]["csrf"]

    async def post(self, body: object = A, *, route: str = "kill", **headers: str) -> tuple[int, dict[str, Any]]:
        """With all that is to be proven, as far as `headers` say nothing else; an empty one is left out."""
        given = {"Host": f"127.0.0.1:{self.port}", "X-CSRF-Token": await self.csrf()}
        given |= {"Origin": f"http://127.0.0.1:{self.port}", "Sec-Fetch-Site": "same-origin"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in given.items() if value}
        async with self.client.post(f"http://127.0.0.1:{self.port}/{route}", json=body, headers=sent) as response:
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
    monkeypatch.setattr(access, "is_local", lambda peer: False)


@pytest.mark.parametrize("headers", [{}, {"Origin": "", "Sec_Fetch_Site": ""}], ids=["its page", "a program"])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_caller_that_proves_it_acts(daemon: Daemon, headers: dict[str, str], route: str):
    """A program without a page has the token alone."""
    assert await daemon.post(route=route, **headers) == (200, {"done": route})
    assert daemon.acted == [(route, Order("default", "a", reason="tried"))]


@pytest.mark.parametrize("route", ROUTES)
async def test_no_act_goes_without_the_pages_own_token(daemon: Daemon, route: str):
    assert (await daemon.post(route=route, X_CSRF_Token=""))[0] == 403
    assert (await daemon.post(route=route, Origin="http://evil.example"))[0] == 403
    assert (await daemon.post(route=route, X_Forwarded_For="10.0.0.1"))[0] == 403
    assert daemon.acted == []


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"X_CSRF_Token": ""}, 403, "X-CSRF-Token: is not the token of this process; reload the page"),
        ({"X_CSRF_Token": "gu\u00e9ssed"}, 403, "X-CSRF-Token"),
        ({"Origin": "http://evil.example"}, 403, "a page of http://evil.example may not act here"),
        ({"Origin": "null"}, 403, "a page of null may not"),
        ({"Origin": "http://["}, 403, "a page of http://[ may not"),
        ({"Origin": "http://127.0.0.1:1"}, 403, "a page of http://127.0.0.1:1 may not"),
        ({"Origin": "", "Sec_Fetch_Site": "cross-site"}, 403, "a page of cross-site may not"),
        ({"Content_Type": "text/plain"}, 400, "send application/json"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403, "does not have the name 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:29511", "Origin": ""}, 403, "does not have the name"),
        ({"Host": "%00", "Origin": ""}, 403, "Host"),
        ({"X_Forwarded_For": "10.0.0.1"}, 403, "POST /kill needs a credential of role operate; remote has role"),
        ({"Via": "1.1 proxy"}, 403, "POST /kill needs a credential of role operate"),
    ],
)
async def test_what_is_not_proven_is_refused_with_the_reason(
    daemon: Daemon, headers: dict[str, str], status: int, words: str
):
    answered, body = await daemon.post(**headers)
    assert (answered, daemon.acted) == (status, [])
    assert words in body["error"]


@pytest.mark.parametrize(
    ("shown", "status", "words"),
    [
        ("{token}", 200, ""),
        ("{join_string}", 200, ""),
        ("lighthouse://{token}", 403, "the token is not one of this lighthouse's"),
        ("", 403, "GET /status needs a credential of role view, but the caller presented none"),
    ],
)
async def test_a_program_shows_a_token_or_what_lighthouse_token_prints(
    daemon: Daemon, tmp_path: Path, shown: str, status: int, words: str
):
    made = load_or_make(tmp_path / "made", ())
    tokens = TokenFile(made.folder)
    await daemon.restart(CredentialAccess(tokens, Audit(None)))
    token = tokens.value.newest(Role.VIEW)
    join_string = Coordinator((Address("coordinator", 29510),), made.ca_pin, token).join_string()
    given = shown.format(token=token, join_string=join_string)
    answered, body = await daemon.get("/status", **({"Authorization": f"Bearer {given}"} if given else {}))
    assert answered == status
    assert words in body.get("error", "")


@pytest.mark.parametrize("host", ["localhost", "[::1]", "10.1.2.3", "coordinator.example", "Coordinator.Example."])
async def test_the_names_that_it_is_known_by(daemon: Daemon, host: str):
    where = f"{host}:{daemon.port}"
    assert (await daemon.post(Host=where, Origin=f"http://{where}"))[0] == 200


@pytest.mark.parametrize("body", [[], "a", {"replica_id": 7}, {"run": []}, {"replica_id": "a", "reason": "\ud800"}])
async def test_a_body_that_is_no_order(daemon: Daemon, body: object):
    status, answer = await daemon.post(body)
    assert (status, daemon.acted) == (400, [])
    assert answer["error"].startswith("body: ")


@pytest.mark.parametrize(("body", "status"), [(b"[" * 4_000, 400), (b'"' + b"x" * 20_000 + b'"', 413)])
async def test_a_body_that_is_deep_or_without_end(daemon: Daemon, body: bytes, status: int):
    headers = {"Content-Type": "application/json", CSRF_HEADER: await daemon.csrf()}
    url = f"http://127.0.0.1:{daemon.port}/kill"
    async with daemon.client.post(url, data=body, headers=headers) as response:
        assert (response.status, daemon.acted) == (status, [])


@pytest.mark.parametrize(
    "request_of_login",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Length: 100\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}",
    ],
    ids=["no gzip", "cut off", "a chunk is missing"],
)
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_malformed_body_is_the_callers_fault_and_no_error_of_the_daemon(
    daemon: Daemon, request_of_login: bytes, is_reset: bool, caplog: pytest.LogCaptureFixture
):
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    head = f"POST /login HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + request_of_login)
    await writer.drain()
    await daemon.csrf()  # the daemon has seen the request
    if is_reset:
        writer.transport.abort()
    else:
        writer.write_eof()
        assert b" 500 " not in await asyncio.wait_for(reader.read(), 10)
        writer.close()
    await daemon.csrf()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(UnknownName("replica_id: no live a"), 404), (Unreachable("gone"), 503), (LimitReached("8 at once"), 429)],
)
async def test_an_act_that_fails_says_why(daemon: Daemon, error: Exception, status: int):
    daemon.error = error
    assert await daemon.post() == (status, {"error": str(error)})


async def test_the_page_is_told_whether_it_may_and_why_not(daemon: Daemon):
    assert (await daemon.get("/control"))[1] == {
        "may_act": True,
        "may_view": True,
        "why": "",
        "csrf": await daemon.csrf(),
    }
    _, told = await daemon.get("/control", Host="evil.example")
    assert (told["may_act"], told["csrf"]) == (False, "")
    assert "does not have the name" in told["why"]


@pytest.mark.usefixtures("from_afar")
async def test_from_another_host_it_may_look_and_not_act(daemon: Daemon):
    status, refused = await daemon.post()
    assert (status, daemon.acted) == (403, [])
    _, told = await daemon.get("/control")
    assert (told["may_act"], told["why"]) == (False, refused["error"])
    assert "lighthouse token operate" in told["why"]
    assert (await daemon.get("/status"))[0] == 200


FOREIGN = ["Bearer x", "Basic eDp4", "Digest y", "bearer"]
"""What any page can send as its Authorization."""


@pytest.mark.parametrize("shown", ["", *FOREIGN])
@pytest.mark.parametrize("path", ["/status", "/metrics", "/events", "/incidents/i1"])
async def test_a_foreign_name_that_resolves_here_reads_nothing(daemon: Daemon, path: str, shown: str):
    """DNS rebinding: the browser takes evil.example for its own page's host."""
    headers = {"Authorization": shown} if shown else {}
    status, body = await daemon.get(path, Host=f"evil.example:{daemon.port}", **headers)
    assert status == 403
    assert f"does not have the name 'evil.example:{daemon.port}'" in body["error"]


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
    monkeypatch.setattr(access, "is_local", lambda peer: False)
    assert (await daemon.get("/incidents/i1"))[0] == 403


async def test_only_a_good_token_opens_it_under_any_name(daemon: Daemon, tmp_path: Path):
    tokens = TokenFile(load_or_make(tmp_path / "made", ()).folder)
    await daemon.restart(CredentialAccess(tokens, Audit(None), anonymous=ANONYMOUS))
    for shown in FOREIGN:
        assert (await daemon.get("/status", Host="evil.example", Authorization=shown))[0] == 403, shown
    good = f"Bearer {tokens.value.newest(Role.VIEW)}"
    assert (await daemon.get("/status", Host="any.example", Authorization=good))[0] == 200


async def test_logins_by_one_token_end_none_of_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "MAX_LOGINS_OF_A_TOKEN", 3)
    logins = control._Logins()
    operator = logins.add("operate")
    viewers = [logins.add("view") for _ in range(10)]
    assert logins.token(operator) == "operate"
    assert [logins.token(name) for name in viewers] == [""] * 7 + ["view"] * 3


async def test_logins_are_bounded_where_no_token_is_checked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    """A proxy may forward the requests of others to a lighthouse on a loopback address."""
    logins = control._Logins()
    monkeypatch.setattr(control, "MAX_LOGINS", 3)
    monkeypatch.setattr(control, "_Logins", lambda: logins)
    await daemon.restart(access.LoopbackAccess())
    for number in range(10):
        assert (await daemon.post({"token": f"any-{number}"}, route="login", Via="1.1 proxy"))[0] == 200
    assert [token for token, _ in logins._tokens.values()] == ["any-7", "any-8", "any-9"]
