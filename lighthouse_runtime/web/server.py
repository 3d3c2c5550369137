"""A daemon's HTTP server: liveness, readiness, metrics, status, and the status page with its actions.

A client must send a complete request within HEADERS_WITHIN_S, after connecting and after each answer. If there are more
than MAX_CONNECTIONS, the server closes one of the host that has the most, preferably one without a status feed.
"""

import asyncio
import gzip
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_runtime.net.address import listening_socket, split_bind
from lighthouse_runtime.server.rpc_handler import Call
from lighthouse_runtime.timing.pacing import Snapshots, SparseLog
from lighthouse_runtime.web.control import JSON_HEADERS, Handler, HttpControl, HttpGuard, refused
from lighthouse_runtime.web.status_feed import StatusFeed, cut, to_json

MAX_BODY_BYTES = 16 * 1024
COMPRESSED_ABOVE_BYTES = 4 * 1024
HEADERS_WITHIN_S = 5.0
MAX_CONNECTIONS = 256
# Paths that a follower serves itself, without a redirect to the leader.
OWN_PATHS = frozenset({"/livez", "/readyz", "/metrics", "/log"})

log = logging.getLogger(__name__)


class _WellFormedOnly(logging.Filter):
    """Drops log records with tracebacks about malformed HTTP, which is the client's fault."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logging.getLogger("aiohttp.server").addFilter(_WellFormedOnly())


@dataclass(frozen=True, slots=True)
class Document:
    body: bytes
    content_type: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LeaderRedirect:
    """Redirect to the leader, for requests to a lighthouse that is a follower."""

    reason: str
    url: str = ""  # of the leader; empty if there is none now


@dataclass(frozen=True, slots=True)
class HttpSide:
    """Content of the HTTP server, which calls these functions on the event loop, once per request."""

    is_ready: Callable[[], bool]
    metrics: Callable[[], tuple[bytes, str]]  # body and content type
    status: Callable[[], object]
    guard: HttpGuard
    page: Document | None = None  # adds the status as events
    control: HttpControl | None = None
    incident: Callable[[str, Call], object] | None = None  # by id, with the output of ranks
    log: Callable[[], str] | None = None  # newest lines of this process
    redirect: Callable[[], LeaderRedirect | None] = lambda: None  # not None while this daemon is a follower


class HttpServer:
    def __init__(self, side: HttpSide) -> None:
        self._side = side
        self._feed = StatusFeed(side.status)
        self._metrics_cache = Snapshots(lambda _: side.metrics())
        self._status_cache = Snapshots(lambda _: _Body.compress(to_json(side.status())))
        self._listener: asyncio.Server | None = None
        self._cuts = SparseLog(log, "connection_cut")
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for route, handler in self._routes().items():
            method, path = route.split()
            add = app.router.add_get if method == "GET" else app.router.add_post
            handler = handler if path in OWN_PATHS else self._or_redirect(handler)
            add(path, side.guard.guarded(route, handler))
        app.on_shutdown.append(self._end_feed)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handle_signals=False, keepalive_timeout=HEADERS_WITHIN_S
        )

    def _routes(self) -> Mapping[str, Handler]:
        """Return the handlers by route ("GET /status"), as in lighthouse_protocol/rules/access.py."""
        side = self._side
        routes: dict[str, Handler] = {
            "GET /livez": self._livez,
            "GET /readyz": self._readyz,
            "GET /metrics": self._metrics,
            "GET /status": self._status,
        }
        if side.page is not None:
            routes |= {"GET /": self._page, "GET /events": self._events}
        if side.control is not None:
            routes |= {
                "GET /control": side.control.describe,
                "POST /login": side.guard.login,
                **side.control.routes(),
            }
        if side.incident is not None:
            routes["GET /incidents/{id}"] = self._incident
        if (lines := side.log) is not None:
            routes["GET /log"] = lambda _: _text(lines())
        return routes

    async def start(self, bind: str, tls: ssl.SSLContext | None = None) -> int:
        """Listen on `bind` (HOST:PORT), with HTTPS if `tls` is given.

        Returns:
            The port.

        Raises:
            InvalidRequest: The server cannot listen on `bind`.
        """
        try:
            listener = listening_socket(*split_bind(bind, "--http"))
        except OSError as e:
            raise InvalidRequest(f"cannot listen on {bind}: {e.strerror or e}; choose another", field="--http") from e
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self._connect, sock=listener, ssl=tls, ssl_handshake_timeout=HEADERS_WITHIN_S if tls is not None else None
        )
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _connect(self) -> web.RequestHandler:
        """Return the handler of a new connection. Close another connection if there are too many."""
        server = self._runner.server
        assert server is not None
        open_ones: list[web.RequestHandler] = server.connections
        if len(open_ones) >= MAX_CONNECTIONS:
            victim = self._victim(open_ones)
            self._cuts.warning("%d HTTP connections are open: one of %s is cut", MAX_CONNECTIONS, _host(victim))
            cut(victim)
        return server()

    def _victim(self, open_ones: Sequence[web.RequestHandler]) -> web.RequestHandler:
        """Choose the connection to close.

        This is the oldest one without a status feed, or else the oldest one, of the host with the most connections.
        """
        [(most, _)] = Counter(map(_host, open_ones)).most_common(1)
        own = [each for each in open_ones if _host(each) == most]
        return next((each for each in own if not self._feed.has_client(each)), own[0])

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    def _or_redirect(self, handler: Handler) -> Handler:
        """Return a handler that redirects to the leader while this lighthouse is a follower."""

        async def shown(request: web.Request) -> web.StreamResponse:
            redirect = self._side.redirect()
            if redirect is None:
                return await handler(request)
            if redirect.url:
                raise web.HTTPTemporaryRedirect(f"{redirect.url}{request.rel_url}")
            return web.json_response({"error": redirect.reason}, status=503, headers=JSON_HEADERS)

        return shown

    def close_feeds(self) -> None:
        """Close all status feeds. The browsers reconnect and are redirected to the current leader."""
        self._feed.close()
        self._feed = StatusFeed(self._side.status)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._feed.serve(request)

    async def _readyz(self, _: web.Request) -> web.Response:
        redirect = self._side.redirect()
        if redirect is not None:
            return web.Response(text=f"{redirect.reason}\n", status=503)
        ready = self._side.is_ready()
        return web.Response(text="ok\n" if ready else "draining\n", status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._metrics_cache.get("")
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        shown = self._status_cache.get("")
        is_gzip = bool(shown.gzipped) and "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
        headers = {**JSON_HEADERS, hdrs.VARY: hdrs.ACCEPT_ENCODING}
        if is_gzip:
            headers[hdrs.CONTENT_ENCODING] = "gzip"
        return web.Response(
            body=shown.gzipped if is_gzip else shown.plain, content_type="application/json", headers=headers
        )

    async def _incident(self, request: web.Request) -> web.Response:
        assert self._side.incident is not None
        try:
            return _json(self._side.incident(request.match_info["id"], self._side.guard.call_of(request)))
        except LighthouseError as e:
            return refused(e)

    async def _end_feed(self, _: web.Application) -> None:
        self._feed.close()

    async def _page(self, _: web.Request) -> web.Response:
        page = self._side.page
        assert page is not None
        return web.Response(body=page.body, content_type=page.content_type, charset="utf-8", headers=dict(page.headers))


@dataclass(frozen=True, slots=True)
class _Body:
    """A response body, plain and compressed. `gzipped` is empty if the body is too short for compression."""

    plain: bytes
    gzipped: bytes

    @classmethod
    def compress(cls, plain: bytes) -> "_Body":
        return cls(plain, gzip.compress(plain, 1) if len(plain) > COMPRESSED_ABOVE_BYTES else b"")


def _host(connection: web.RequestHandler) -> str:
    peer = connection.transport.get_extra_info("peername") if connection.transport is not None else None
    return str(peer[0]) if peer else "nowhere"


def _json(value: object) -> web.Response:
    body = to_json(value)
    response = web.Response(body=body, content_type="application/json", headers=JSON_HEADERS)
    if len(body) > COMPRESSED_ABOVE_BYTES:
        response.enable_compression()  # if the client accepts it
    return response


async def _text(text: str) -> web.Response:
    return web.Response(text=text)
