"""A daemon's HTTP server: liveness, readiness, metrics, status, and the status page with its actions.

A client must send a complete request within HEADERS_WITHIN_S, after connecting and after each answer. If there are more
than MAX_CONNECTIONS, the server closes a connection of the host with the most, preferably one without a status feed.
"""

import asyncio
import dataclasses
import errno
import functools
import gzip
import json
import logging
import ssl
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import listening_socket, split_bind
from lighthouse_runtime.process.children import describe_listener
from lighthouse_runtime.server.grpc_server import Call
from lighthouse_runtime.timing.pacing import Snapshots, SparseLog
from lighthouse_runtime.web.control import JSON_HEADERS, Handler, HttpControl, HttpGuard, refused

MAX_BODY_BYTES = 16 * 1024
COMPRESSED_ABOVE_BYTES = 4 * 1024
HEADERS_WITHIN_S = 5.0
MAX_CONNECTIONS = 256
# Paths that a follower serves itself, without a redirect to the leader.
OWN_PATHS = frozenset({"/livez", "/readyz", "/metrics", "/log"})

log = logging.getLogger(__name__)


class _WellFormedOnly(logging.Filter):
    """Drops log records of errors caused by malformed HTTP, which is the client's fault."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


logging.getLogger("aiohttp.server").addFilter(_WellFormedOnly())


@dataclass(frozen=True, slots=True)
class Document:
    body: bytes
    content_type: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LeaderRedirect:
    """Answer of a follower lighthouse to a request: a redirect to the leader's `url`, or an error with `reason`."""

    reason: str
    url: str = ""  # of the leader; empty if no leader is known


MAX_CLIENTS = 64
EVERY_S = 0.5
FEED_SHARE = 0.05
WRITTEN_WITHIN_S = 20.0
RETRY_MS = 1000

_GZIP_HEADER = bytes((0x1F, 0x8B, zlib.DEFLATED, 0, 0, 0, 0, 0, 0, 255))  # RFC 1952: no name, no time, unknown system
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class _Frame:
    number: int
    plain: bytes
    deflated: bytes

    @classmethod
    def render(cls, number: int, snapshot: object) -> "_Frame":
        plain = b"event: status\nid: %d\nretry: %d\ndata: %b\n\n" % (number, RETRY_MS, to_json(snapshot))
        deflate = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
        return cls(number, plain, deflate.compress(plain) + deflate.flush(zlib.Z_FULL_FLUSH))


def to_json(value: object) -> bytes:
    """Serialise to JSON. Dataclasses become objects; this is much faster than dataclasses.asdict."""
    return json.dumps(value, default=_members, separators=(",", ":")).encode()


def _members(value: object) -> dict[str, object]:
    return {name: getattr(value, name) for name in _names(type(value))}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


class StatusFeed:
    """Sends the status to browsers as server-sent events. A snapshot is serialised and compressed once for all of them.

    `status` is called on the event loop. Its immutable result is serialised in a thread.

    1. A client gets the newest snapshot only. A slow client skips snapshots and does not delay others; a client that
       does not read at all is disconnected.
    2. Snapshots are made only while a browser is connected, and so rarely that they take at most FEED_SHARE of the
       event loop's time.
    3. A compressed event consists of complete deflate blocks without references to earlier data (zlib's full flush). So
       the same bytes can be sent to every client, whenever it connected. gzip's trailer is never sent, because the
       streams do not end.
    4. At MAX_CLIENTS, a new client replaces another: the oldest that does not read, or else the oldest of the host with
       the most clients. A disconnected browser reconnects automatically.
    """

    def __init__(self, status: Callable[[], object], every_s: float = EVERY_S) -> None:
        self._status = status
        self._every_s = every_s
        self._clients: dict[web.RequestHandler, str] = {}  # hosts by connection, the oldest first
        self._pump: asyncio.Task[None] | None = None
        self._newest: _Frame | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self._cuts = SparseLog(log, "browser_cut")

    @property
    def clients(self) -> int:
        return len(self._clients)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /events with a stream of status events, until the client disconnects or close() is called."""
        if self._is_closed:
            return web.Response(
                status=503, text="the server is stopping; ask for status instead\n", headers={"Retry-After": "10"}
            )
        if len(self._clients) >= MAX_CLIENTS:
            self._cut_one()
        self._clients[request.protocol] = request.remote or ""
        if self._pump is None:
            self._pump = asyncio.create_task(self._make_frames())
        try:
            return await self._stream(request)
        finally:
            self._clients.pop(request.protocol, None)
            if not self._clients:
                self._stop_pump()

    def close(self) -> None:
        """Close all streams and refuse new ones."""
        self._is_closed = True
        self._stop_pump()
        for client in self._clients:
            if client.writing_paused:
                cut(client)
        self._wake_readers()

    def has_client(self, connection: web.RequestHandler) -> bool:
        return connection in self._clients

    def _cut_one(self) -> None:
        [(host, _)] = Counter(self._clients.values()).most_common(1)
        oldest = next(client for client, its_host in self._clients.items() if its_host == host)
        victim = next((client for client in self._clients if client.writing_paused), oldest)
        self._cuts.warning("%d browsers are connected: disconnecting one at %s", MAX_CLIENTS, self._clients.pop(victim))
        cut(victim)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        is_gzip = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
        response = web.StreamResponse(headers=_HEADERS | ({"Content-Encoding": "gzip"} if is_gzip else {}))
        response.content_type = "text/event-stream"
        await response.prepare(request)
        sent = 0
        try:
            if is_gzip:
                await response.write(_GZIP_HEADER)
            while (frame := await self._next(sent)) is not None:
                async with asyncio.timeout(WRITTEN_WITHIN_S):
                    await response.write(frame.deflated if is_gzip else frame.plain)
                sent = frame.number
        except (ConnectionError, TimeoutError):  # the client has disconnected, or does not read
            cut(request.protocol)
        return response

    async def _next(self, sent: int) -> _Frame | None:
        """Wait for a status event whose number is above `sent`. Return None after close()."""
        while not self._is_closed:
            if self._newest is not None and self._newest.number > sent:
                return self._newest
            await self._changed.wait()
        return None

    async def _make_frames(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        while True:
            number, began_at = number + 1, loop.time()
            try:
                snapshot = self._status()
                took_s = loop.time() - began_at
                self._newest = await asyncio.to_thread(_Frame.render, number, snapshot)
            except Exception:  # a bug must not stop the feed
                log.exception("cannot build the status", extra=event("status_failed"))
                took_s = self._every_s
            self._wake_readers()
            await asyncio.sleep(max(self._every_s, took_s / FEED_SHARE))

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        self._pump = self._newest = None


def cut(client: web.RequestHandler) -> None:
    """Close a connection at once, without sending buffered data."""
    if client.transport is not None:
        client.transport.abort()


@dataclass(frozen=True, slots=True)
class HttpSide:
    """Content that a daemon provides for its HttpServer. All functions are called on the event loop."""

    is_ready: Callable[[], bool]
    metrics: Callable[[], tuple[bytes, str]]  # body and content type
    status: Callable[[], object]
    guard: HttpGuard
    page: Document | None = None  # adds the status as events
    control: HttpControl | None = None
    incident: Callable[[str, Call], object] | None = None  # by id, with the output of ranks
    log: Callable[[], str] | None = None  # newest lines of this process
    hooks: Mapping[str, Handler] = field(default_factory=dict[str, Handler])  # more routes
    redirect: Callable[[], LeaderRedirect | None] = lambda: None  # not None while this daemon is a follower


class HttpServer:
    def __init__(self, side: HttpSide) -> None:
        self._side = side
        self._feed = StatusFeed(side.status)
        self._metrics_cache = Snapshots[str, tuple[bytes, str]]()
        self._status_cache = Snapshots[str, _Body]()
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
        if side.log is not None:
            routes["GET /log"] = self._log
        return routes | dict(side.hooks)

    async def start(self, bind: str, tls: ssl.SSLContext | None = None) -> int:
        """Listen on `bind` (HOST:PORT), with HTTPS if `tls` is given. Return the port, or raise InvalidRequest."""
        host, port = split_bind(bind, "--http")
        try:
            listener = listening_socket(host, port)
        except OSError as e:
            is_taken = e.errno == errno.EADDRINUSE
            why = f"the port is in use by {describe_listener(port)}" if is_taken else e.strerror or e
            raise InvalidRequest(f"cannot listen on {bind}: {why}; choose another", field="--http") from e
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
            self._cuts.warning("%d HTTP connections are open: closing one of %s", MAX_CONNECTIONS, _host(victim))
            cut(victim)
        return server()

    def _victim(self, open_ones: Sequence[web.RequestHandler]) -> web.RequestHandler:
        """Choose a connection to close, from the host that has the most connections.

        Return the host's oldest connection without a status feed, or else its oldest connection.
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
        body, content_type = self._metrics_cache.get("", self._side.metrics)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        shown = self._status_cache.get("", lambda: _Body.compress(to_json(self._side.status())))
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

    async def _log(self, _: web.Request) -> web.Response:
        assert self._side.log is not None
        return web.Response(text=self._side.log())

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
