"""Live state over HTTP: the source publishes one snapshot under a key, the target fetches exactly that one.

    GET /checkpoint/{quorum_id}/{step}/{group_rank}?wait_s=...
    200  the encoding of format.py, with its Content-Length
    409  another key, or none, is held: JSON {"asked": key, "held": key or null}; sent after up to `wait_s`, because
         the target may ask before the source has its snapshot

Plain text, for a network that is trusted as far as the gradients that cross it are.
"""

import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from agent_client.checkpoint.fetch import StateUnavailable, fetch, host_in_url
from agent_client.checkpoint.format import CHUNK_BYTES, CorruptState, Encoding, encode
from agent_client.checkpoint.shelf import NotHeldError, Shelf, StateKey
from agent_client.checkpoint.tree import State

__all__ = ["CheckpointServer", "CorruptState", "StateKey", "StateUnavailable", "fetch"]

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
_ACCEPT_RETRY_S = 0.05
_ROUTE = re.compile(r"/checkpoint/([0-9]{1,20})/([0-9]{1,20})/([0-9]{1,20})(?:\?wait_s=([0-9]{1,9}(?:\.[0-9]+)?))?")


class CheckpointServer:
    """Serves at most one state, from threads of its own, to any number of readers.

    `advertise`: host name or IP address under which peers reach this host. `stall_timeout_s`: how long one chunk may
    take a reader. `max_wait_s`: how long a request may wait for its key. In a forked child it is closed.
    """

    def __init__(
        self,
        bind_host: str = "",
        *,
        advertise: str,
        port: int = 0,
        stall_timeout_s: float = 30.0,
        max_wait_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._shelf = Shelf()
        self._chunk_bytes = chunk_bytes
        self._listener = _Listener(bind_host, port, partial(_Handler, self._shelf, stall_timeout_s, max_wait_s))
        self.address = f"http://{host_in_url(advertise)}:{self._listener.server_address[1]}"
        _listeners.add(self._listener)

    def publish(self, key: tuple[int, int, int], state: State) -> None:
        """Offer `state` under `key` and nothing else; as with `withdraw`, what was offered before is read no more.

        `state` must not change until it is withdrawn: pass a `snapshot`. TypeError or ValueError for what cannot be
        sent, before anything changed.
        """
        encoding = encode(state, chunk_bytes=self._chunk_bytes)
        self._shelf.put(StateKey(*key), encoding)

    def withdraw(self, grace_s: float = 0.0) -> None:
        """Offer nothing. Streams in flight may finish for `grace_s`, then they are aborted.

        When it returns nothing reads the state, which may change again. TimeoutError where a read cannot be ended.
        """
        self._shelf.clear(grace_s)

    def close(self) -> None:
        """End every stream, every thread and the socket. Calling it again does nothing."""
        self._shelf.close()
        self._listener.close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "lighthouse-checkpoint"
    sys_version = ""

    def __init__(self, shelf: Shelf, stall_timeout_s: float, max_wait_s: float, *request: Any) -> None:
        self._shelf = shelf
        self._max_wait_s = max_wait_s
        self._stall_timeout_s = stall_timeout_s
        super().__init__(*request)

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self._stall_timeout_s)

    def do_GET(self) -> None:
        if (match := _ROUTE.fullmatch(self.path)) is None:
            self.send_error(404)
            return
        key = StateKey(*map(int, match.groups()[:3]))
        wait_s = min(float(match[4] or 0), self._max_wait_s)
        try:
            with self._shelf.reading(key, wait_s, self.connection) as encoding:
                self._stream(key, encoding)
        except NotHeldError as error:
            self._refuse(key, error.held)

    def _stream(self, key: StateKey, encoding: Encoding) -> None:
        began_at = time.monotonic()
        self._start(200, "application/octet-stream", encoding.length)
        for chunk in encoding:
            self.wfile.write(chunk)
        took_s = time.monotonic() - began_at
        logger.info("sent the state of %s to %s: %d bytes, %.3f s", key, self.client_address, encoding.length, took_s)

    def _refuse(self, asked: StateKey, held: StateKey | None) -> None:
        body = json.dumps({"asked": asked._asdict(), "held": held and held._asdict()}).encode()
        self._start(409, "application/json", len(body))
        self.wfile.write(body)

    def _start(self, status: int, content_type: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.client_address, *args)


class _Listener(TCPServer):
    """Accepts in one daemon thread, serves each connection in another, and can end them all."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.address_family = _family(host)
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            error.add_note(f"while listening for readers of the state on {host or '*'}:{port}")
            raise
        self._acceptor = threading.Thread(target=self._accept, name="checkpoint-accept", daemon=True)
        self._acceptor.start()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if not self._is_closed:
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(_ACCEPT_RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        serve = partial(self._serve, request, client_address)
        thread = threading.Thread(target=serve, name="checkpoint-stream", daemon=True)
        with self._lock:
            thread.start()
            self._connections[request] = thread

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(JOIN_TIMEOUT_S)
        self.server_close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in connections.values():
            thread.join(JOIN_TIMEOUT_S)

    def abandon(self) -> None:
        """In a forked child: let go of the sockets, so that their peers see when the parent has died."""
        for held in [self.socket, *self._connections]:
            with suppress(OSError):
                os.close(held.detach())

    def _accept(self) -> None:
        while not self._is_closed:
            self.handle_request()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            logger.info("a reader of the state is gone or stalls, %s: %s", client_address, error)
        except Exception:
            logger.exception("cannot send the state to %s", client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                del self._connections[request]


def _family(host: str) -> socket.AddressFamily:
    if host:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()


def _abandon_all() -> None:
    for listener in list(_listeners):
        listener.abandon()


os.register_at_fork(after_in_child=_abandon_all)
