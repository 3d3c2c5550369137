"""The status as server-sent events. All clients share one snapshot, serialised and compressed once.

1. A client gets the newest snapshot only. A slow client skips snapshots and does not delay others; a client that does
   not read at all is disconnected.
2. Snapshots are made only while a browser is connected, at intervals that limit them to LOOP_SHARE of the loop's time.
3. A compressed event consists of complete deflate blocks without references to earlier data (zlib's full flush). So
   the same bytes can be sent to every client, whenever it connected. gzip's trailer is never sent, because the streams
   do not end.
4. At MAX_CLIENTS, a new client replaces another: the oldest that does not read, or else the oldest of the host with the
   most clients. A disconnected browser reconnects automatically.
"""

import asyncio
import dataclasses
import functools
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import hdrs, web

from lighthouse_runtime.log_event import event
from lighthouse_runtime.timing.pacing import SparseLog

log = logging.getLogger(__name__)

MAX_CLIENTS = 64
EVERY_S = 0.5
LOOP_SHARE = 0.05
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
    def of(cls, number: int, snapshot: object) -> "_Frame":
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
    """Sends the status to browsers. `status` is called on the loop; its immutable result is serialised in a thread."""

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
        self._wake()

    def has_client(self, connection: web.RequestHandler) -> bool:
        return connection in self._clients

    def _cut_one(self) -> None:
        [(host, _)] = Counter(self._clients.values()).most_common(1)
        oldest = next(client for client, its_host in self._clients.items() if its_host == host)
        victim = next((client for client in self._clients if client.writing_paused), oldest)
        self._cuts.warning("%d browsers listen already: one at %s is cut", MAX_CLIENTS, self._clients.pop(victim))
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
        """Wait for a frame with a number above `sent`. Return None after close()."""
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
                self._newest = await asyncio.to_thread(_Frame.of, number, snapshot)
            except Exception:  # a bug must not stop the feed
                log.exception("cannot build the status", extra=event("status_failed"))
                took_s = self._every_s
            self._wake()
            await asyncio.sleep(max(self._every_s, took_s / LOOP_SHARE))

    def _wake(self) -> None:
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
