"""Acting through the page: what a browser must prove before the control policy is asked at all.

A browser acts with its user's reach, on behalf of any site that is open in it. So, in this order:

1. Host names this daemon: an IP address, a loopback name, or a name that it knows to be its own. Else a foreign name
   that is made to resolve here (DNS rebinding) would count as the daemon's own page.
2. Origin, which a page cannot forge, is that same host.
3. The body is JSON by its type, which no foreign form can send unasked.
4. X-CSRF-Token is this process's, which only its own page can read.

Then the policy of the RPCs is asked. A request through a proxy is not local, wherever it came from.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
from aiohttp import hdrs, web

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import TOKEN_METADATA_KEY
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotPermitted
from lighthouse_protocol.wire.status_codes import status_of
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.rpc_handler import Call

CSRF_HEADER = "X-CSRF-Token"
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
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True, slots=True)
class KillOrder:
    job: str
    replica_id: str
    reason: str


Kill = Callable[[KillOrder, Call], Awaitable[object]]


class HttpControl:
    """`names`: those of this daemon, beside its addresses. `kill` asks the policy by itself."""

    def __init__(self, policy: ControlPolicy, kill: Kill, names: Iterable[str] = ()) -> None:
        self._policy = policy
        self._kill = kill
        self._names = {name.lower() for name in (socket.gethostname(), *names) if name}
        self._csrf = secrets.token_urlsafe(32)

    async def describe(self, request: web.Request) -> web.Response:
        """Whether the caller may act here, why not, and what its page needs for it."""
        try:
            self.check_host(request)
        except NotPermitted as e:
            return _answer({"may_kill": False, "takes_token": False, "why": str(e), "csrf": ""})
        why, takes_token = "", self._policy.token is not None
        try:
            self._policy.check(_call(request))
        except NotPermitted as e:
            why = str(e)
        return _answer({"may_kill": not why, "takes_token": takes_token, "why": why, "csrf": self._csrf})

    async def kill(self, request: web.Request) -> web.Response:
        try:
            self._check(request)
            order = _order(await _body(request))
            await self._kill(order, _call(request))
        except LighthouseError as e:
            return refused(e)
        return _answer({"job": order.job, "replica_id": order.replica_id, "killed": True})

    def check_reader(self, request: web.Request) -> None:
        """Raises NotPermitted for a caller that may not see what ranks print, and where they are in their code."""
        self.check_host(request)
        self._policy.check(_call(request))

    def check_host(self, request: web.Request) -> None:
        """Raises NotPermitted."""
        host = request.headers.get(hdrs.HOST, "")
        try:
            address = parse_address(host, hdrs.HOST)
        except InvalidRequest as e:
            raise NotPermitted(str(e)) from None
        is_own = address.host.lower().removesuffix(".") in self._names
        if not (address.is_ip or address.is_loopback or is_own):
            raise NotPermitted(
                f"Host: this daemon does not know itself as {host!r}; a name that another site makes to resolve here "
                "would look the same; open the page by the daemon's IP address or its own host name"
            )

    def _check(self, request: web.Request) -> None:
        self.check_host(request)
        origin = request.headers.get(hdrs.ORIGIN)
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        if site != "same-origin" or (origin is not None and urlsplit(origin).netloc != request.headers[hdrs.HOST]):
            raise NotPermitted(f"Origin: a page of {origin or site} may not act here; use the daemon's own page")
        if request.content_type != "application/json":
            raise InvalidRequest(f"is {request.content_type}; send application/json", field=hdrs.CONTENT_TYPE)
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(errors="replace"), self._csrf.encode()):
            raise NotPermitted(
                f"{CSRF_HEADER}: is not this process's; reload the page, or as a program ask for control first, or use "
                "the command line's kill"
            )


def refused(error: LighthouseError) -> web.Response:
    return _answer({"error": str(error)}, _HTTP_STATUS.get(status_of(error), 500))


def _call(request: web.Request) -> Call:
    where = request.transport.get_extra_info("peername") if request.transport is not None else None
    peer = f"ip:[{where[0]}]:{where[1]}" if where else "nobody"
    if any(header in request.headers for header in _PROXIED):
        peer = "a proxy"
    token = request.headers.get(TOKEN_METADATA_KEY, "")
    return Call(ACTS_WITHIN_S, peer, {TOKEN_METADATA_KEY: token})


async def _body(request: web.Request) -> Mapping[str, object]:
    try:
        async with asyncio.timeout(ACTS_WITHIN_S):
            body = json.loads(await request.read())
    except (ValueError, RecursionError, TimeoutError):
        body = None
    if not isinstance(body, dict):
        raise InvalidRequest("is no JSON object", field="body")
    return body


def _order(body: Mapping[str, object]) -> KillOrder:
    given = [body.get(name, "") for name in ("job", "replica_id", "reason")]
    if not all(isinstance(value, str) for value in given):
        raise InvalidRequest("job, replica_id and reason are text", field="body")
    job, replica_id, reason = map(str, given)
    if any("\ud800" <= character <= "\udfff" for text in (job, replica_id, reason) for character in text):
        raise InvalidRequest("job, replica_id and reason are text; a lone surrogate is none", field="body")
    return KillOrder(job, replica_id, reason)


def _answer(body: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=JSON_HEADERS)
