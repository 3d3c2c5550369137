"""A daemon's HTTP side, on the same loop: liveness, readiness, metrics, status; and a page that is told and may act."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, UnknownName
from lighthouse_runtime.net.bind import listening_socket, split_bind
from lighthouse_runtime.web.control import JSON_HEADERS, HttpControl, refused
from lighthouse_runtime.web.status_feed import StatusFeed, to_json

MAX_BODY_BYTES = 16 * 1024
COMPRESSED_ABOVE_BYTES = 4 * 1024


class _WellFormedOnly(logging.Filter):
    """A request that is no HTTP is its sender's fault, and not worth a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logging.getLogger("aiohttp.server").addFilter(_WellFormedOnly())


@dataclass(frozen=True, slots=True)
class Document:
    body: bytes
    content_type: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpSide:
    """What the HTTP side shows; every function is called on the loop, at the moment of the request.

    With `page` comes the status as events. `control`: which browsers may act through the page; `incident`: by its id,
    with the output of ranks, for those that may act.
    """

    is_ready: Callable[[], bool]
    metrics: Callable[[], tuple[bytes, str]]
    status: Callable[[], object]
    page: Document | None = None
    control: HttpControl | None = None
    incident: Callable[[str], object] | None = None


class HttpServer:
    def __init__(self, side: HttpSide) -> None:
        self._side = side
        self._feed = StatusFeed(side.status)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        if side.page is not None:
            app.router.add_get("/", self._page)
            app.router.add_get("/events", self._feed.serve)
        if side.control is not None:
            app.router.add_get("/control", side.control.describe)
            app.router.add_post("/kill", side.control.kill)
            app.router.add_get("/incidents/{id}", self._incident)
        app.on_shutdown.append(self._end_feed)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handle_signals=False)

    async def start(self, bind: str) -> int:
        """Listen on `bind`; the port. Raises InvalidRequest if that is impossible, with the reason."""
        try:
            listener = listening_socket(*split_bind(bind, "--http"))
        except OSError as e:
            raise InvalidRequest(f"cannot listen on {bind}: {e.strerror or e}; choose another", field="--http") from e
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._side.is_ready()
        return web.Response(text="ok\n" if ready else "draining\n", status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._side.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._side.status())

    async def _incident(self, request: web.Request) -> web.Response:
        control, incident = self._side.control, self._side.incident
        assert control is not None
        try:
            control.check_reader(request)
            if incident is None:
                raise UnknownName("this daemon keeps no incidents")
            return _json(incident(request.match_info["id"]))
        except LighthouseError as e:
            return refused(e)

    async def _end_feed(self, _: web.Application) -> None:
        self._feed.close()

    async def _page(self, _: web.Request) -> web.Response:
        page = self._side.page
        assert page is not None
        return web.Response(body=page.body, content_type=page.content_type, charset="utf-8", headers=dict(page.headers))


def _json(value: object) -> web.Response:
    body = to_json(value)
    response = web.Response(body=body, content_type="application/json", headers=JSON_HEADERS)
    if len(body) > COMPRESSED_ABOVE_BYTES:
        response.enable_compression()  # as far as the client takes it
    return response
