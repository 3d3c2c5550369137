"""Access control of the HTTP routes, and the actions of the status page (kill, drain, stop, resume).

A website that is open in a browser can make it send requests to this daemon. So every request is checked, in this
order:

1. The Host header names this daemon: an IP address, a loopback name, or one of its own names. Otherwise a foreign name
   that resolves to this host (DNS rebinding) would count as the daemon's own page. A request with a valid token may
   use any host name, since a foreign page has no token. An Authorization header without a valid token does not count.
2. The caller has a role that may use the route (lighthouse_protocol/rules/access.py).

Actions also require:

3. The Origin header, which a page cannot forge, names the same host.
4. The content type is JSON, which a form on a foreign page cannot send.
5. The X-CSRF-Token header has the token of this process, which only its own page can read.

A request through a proxy never counts as local.

A browser does not add a token by itself. The page logs in once with a token (POST /login, with checks 1, 3 and 4) and
gets a cookie that scripts cannot read and foreign sites cannot send. It expires with the token, or after 12 hours.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

import grpc
from aiohttp import hdrs, web

from lighthouse_protocol.coordinator import SCHEME, parse_coordinator
from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import TOKEN_METADATA_KEY, TOKEN_SCHEME
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotPermitted
from lighthouse_protocol.rules.access import NOBODY, Role, check, needed
from lighthouse_protocol.wire.codec import status_of
from lighthouse_runtime.security.access import PROXIED, Access, Caller, admit, format_peer, names_in_certificate
from lighthouse_runtime.server.grpc_server import Call

CSRF_HEADER = "X-CSRF-Token"
COOKIE = "lighthouse_login"
LOGIN_LASTS_S = 12 * 3600.0
MAX_LOGINS_OF_A_TOKEN = 200
MAX_LOGINS = 10_000  # reached only on a loopback address, where a caller needs no valid token
ACTS_WITHIN_S = 10.0
JSON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True, slots=True)
class Order:
    """Parameters of an operator's action, such as kill or drain, from the body of the HTTP request."""

    job: str
    replica_id: str = ""  # target, empty if there is none
    run: str = ""  # target, empty if there is none
    reason: str = ""


Act = Callable[[Order, Call], Awaitable[Mapping[str, object]]]  # returns a JSON object
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_VIEW_ROUTE = "GET /status"


class _Logins:
    """Tokens of logged-in browsers, by cookie value."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[str, float]] = {}

    def add(self, token: str) -> str:
        """Add a login and return the value of its cookie.

        If the token already has MAX_LOGINS_OF_A_TOKEN logins, remove its oldest one. Otherwise, if there are MAX_LOGINS
        logins, remove the oldest of all.
        """
        own = [name for name, (other, _) in self._tokens.items() if other == token]
        if len(own) >= MAX_LOGINS_OF_A_TOKEN:
            del self._tokens[own[0]]
        elif len(self._tokens) >= MAX_LOGINS:
            del self._tokens[next(iter(self._tokens))]
        name = secrets.token_urlsafe(32)
        self._tokens[name] = (token, time.monotonic() + LOGIN_LASTS_S)
        return name

    def token(self, name: str) -> str:
        """Return the token for the cookie value `name`, or an empty string if the cookie is unknown or expired."""
        token, ends_at = self._tokens.get(name, ("", 0.0))
        return token if time.monotonic() < ends_at else ""


class HttpGuard:
    """Access control for all HTTP routes: checks the host name and the role, and the origin of actions."""

    def __init__(self, access: Access, names: Iterable[str] = ()) -> None:
        """Store the access rules. `names` are host names of this daemon in addition to the host's own."""
        self._access = access
        self._logins = _Logins()
        self._names = {name.lower() for name in (socket.gethostname(), *names) if name}

    def guarded(self, route: str, handler: Handler) -> Handler:
        """Return a handler that authorizes the caller first. Raise KeyError if rules/access.py lacks the route."""
        has_data = Role.PROBE not in needed(route)

        async def guarded(request: web.Request) -> web.StreamResponse:
            caller = self.caller_of(request)
            try:
                if has_data:
                    self._check_host_unless_token(request)
                admit(self._access, route, caller)
            except NotPermitted as e:
                return refused(e)
            return await handler(request)

        return guarded

    def caller_of(self, request: web.Request) -> Caller:
        where = request.transport.get_extra_info("peername") if request.transport is not None else None
        peer = f"ip:[{where[0]}]:{where[1]}" if where else "nobody"
        if _is_proxied(request):
            peer = PROXIED
        shown = Caller(peer, {TOKEN_METADATA_KEY: _shown(request)}, lambda: _names(request))
        token = shown.token or ("" if _shown(request) else self._logins.token(request.cookies.get(COOKIE, "")))
        return _caller(shown, token) if token else shown

    async def login(self, request: web.Request) -> web.Response:
        """Answer POST /login: set a cookie for the token in the body."""
        try:
            self.check_page(request)
            token = (await read_body(request)).get("token")
            if not isinstance(token, str) or not token.isascii():
                raise InvalidRequest("token must be a string", field="body")
            caller = _caller(self.caller_of(request), token.strip())
            principal = self._access.principal(caller)
        except LighthouseError as e:
            if isinstance(e, NotPermitted):
                self._access.audit.refuse(NOBODY, format_peer(self.caller_of(request).peer), "POST /login", str(e))
            return refused(e)
        answer = _answer({"name": principal.name, "roles": sorted(principal.roles)})
        answer.set_cookie(
            COOKIE,
            self._logins.add(caller.token),
            max_age=int(LOGIN_LASTS_S),
            path="/",
            secure=request.secure,
            httponly=True,
            samesite="Strict",
        )
        return answer

    def check_page(self, request: web.Request) -> None:
        """Raise NotPermitted or InvalidRequest unless the daemon's own web page sent the request."""
        self.check_host(request)
        origin = request.headers.get(hdrs.ORIGIN)
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        if site != "same-origin" or (origin is not None and _host_of(origin) != request.headers[hdrs.HOST]):
            raise NotPermitted(f"Origin: a page of {origin or site} may not act here; use the daemon's own page")
        if request.content_type != "application/json":
            raise InvalidRequest(f"is {request.content_type}; send application/json", field=hdrs.CONTENT_TYPE)

    def call_of(self, request: web.Request) -> Call:
        """Convert an HTTP request to the Call object that RPC handlers take, with its caller and time limit."""
        caller = self.caller_of(request)
        return Call(ACTS_WITHIN_S, caller.peer, caller.metadata, self._access.principal(caller))

    def refusal_text(self, route: str, request: web.Request) -> str:
        """Return why the caller may not use `route`, or an empty string if it may."""
        try:
            self._check_host_unless_token(request)
            check(route, self._access.principal(self.caller_of(request)), self._access.port)
        except NotPermitted as e:
            return str(e)
        return ""

    def _check_host_unless_token(self, request: web.Request) -> None:
        """Raise NotPermitted if the Host header does not name this daemon and the request has no valid token."""
        shown = Caller("", {TOKEN_METADATA_KEY: _shown(request)})
        if not self._access.has_good_token(_caller(shown, shown.token) if shown.token else shown):
            self.check_host(request)

    def check_host(self, request: web.Request) -> None:
        """Raise NotPermitted if the Host header does not name this daemon."""
        host = request.headers.get(hdrs.HOST, "")
        try:
            address = parse_address(host, hdrs.HOST)
        except InvalidRequest as e:
            raise NotPermitted(str(e)) from None
        is_own = address.host.lower().removesuffix(".") in self._names
        if not (address.is_ip or address.is_loopback or is_own):
            raise NotPermitted(
                f"Host: this daemon does not have the name {host!r}, which might be a DNS-rebinding attack; "
                "open the page by the daemon's IP address or its own host name"
            )


class HttpControl:
    """HTTP handlers for the actions of the status page. `acts` maps routes, such as "POST /kill", to actions."""

    def __init__(self, guard: HttpGuard, acts: Mapping[str, Act]) -> None:
        self._guard = guard
        self._acts = acts
        self._csrf = secrets.token_urlsafe(32)

    def routes(self) -> Mapping[str, Handler]:
        return {route: self._handler(act) for route, act in self._acts.items()}

    async def describe(self, request: web.Request) -> web.Response:
        """Answer GET /control: whether the caller may act and view, why it may not act, and the CSRF token."""
        refusals = (self._guard.refusal_text(route, request) for route in self._acts)
        why, why_not_seen = next(filter(None, refusals), ""), self._guard.refusal_text(_VIEW_ROUTE, request)
        try:
            self._guard.check_host(request)
        except NotPermitted:
            return _answer({"may_act": False, "may_view": False, "why": why, "csrf": ""})
        return _answer({"may_act": not why, "may_view": not why_not_seen, "why": why, "csrf": self._csrf})

    def _handler(self, act: Act) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            try:
                self._check(request)
                order = _order(await read_body(request))
                return _answer(await act(order, self._guard.call_of(request)))
            except LighthouseError as e:
                return refused(e)

        return handle

    def _check(self, request: web.Request) -> None:
        self._guard.check_page(request)
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(errors="replace"), self._csrf.encode()):
            raise NotPermitted(
                f"{CSRF_HEADER}: is not the token of this process; reload the page. A program must first request "
                "GET /control, or can use the command line"
            )


def refused(error: LighthouseError) -> web.Response:
    return _answer({"error": str(error)}, _HTTP_STATUS.get(status_of(error), 500))


def _caller(caller: Caller, token: str) -> Caller:
    """Return a copy of the caller with `token`. If `token` is a join string, use the token that it contains.

    If the join string is malformed, use it as the token itself, so that the access check rejects it.
    """
    with contextlib.suppress(InvalidRequest):
        if token.startswith(SCHEME):
            token = parse_coordinator(token, "token").token
    return replace(caller, metadata={TOKEN_METADATA_KEY: TOKEN_SCHEME + token})


def _shown(request: web.Request) -> str:
    """Return the Authorization header, or an empty string."""
    return request.headers.get(hdrs.AUTHORIZATION, "")


def _host_of(origin: str) -> str:
    """Return the host and port of an Origin header, or an empty string if the header is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _names(request: web.Request) -> tuple[str, ...]:
    """Return the names in the verified client certificate, if any.

    A request through a proxy has none, because the certificate would be the proxy's.
    """
    tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    found = tls.getpeercert() if tls is not None and not _is_proxied(request) else None
    names = found.get("subjectAltName", ()) if found else ()
    return names_in_certificate(
        (name for kind, name in names if kind == "URI" and name.startswith("spiffe://")),
        (name for kind, name in names if kind == "DNS"),
    )


def _is_proxied(request: web.Request) -> bool:
    return any(header in request.headers for header in _PROXIED)


async def read_body(request: web.Request) -> Mapping[str, object]:
    try:
        async with asyncio.timeout(ACTS_WITHIN_S):
            body = json.loads(await request.read())
    except (ValueError, RecursionError, TimeoutError, ConnectionError, web.RequestPayloadError):
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("is not a JSON object", field="body")
    return body


def _order(body: Mapping[str, object]) -> Order:
    names = [field.name for field in fields(Order)]
    given = {name: body.get(name, "") for name in names}
    if not all(isinstance(value, str) for value in given.values()):
        raise InvalidRequest(f"{', '.join(names[:-1])} and {names[-1]} must be strings", field="body")
    texts = {name: str(value) for name, value in given.items()}
    if any("\ud800" <= character <= "\udfff" for text in texts.values() for character in text):
        raise InvalidRequest(f"{', '.join(names[:-1])} and {names[-1]} must not contain lone surrogates", field="body")
    return Order(**texts)


def _answer(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=JSON_HEADERS)
