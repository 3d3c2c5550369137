"""HTTP server for a training state. A source publishes a state under a key, and targets fetch it by this key.

    GET /challenge
    200  Lighthouse-Nonce: a nonce, valid for the next request on this connection
    GET /manifest/{quorum_id}/{step}/{group_rank}?wait_s=...
         Lighthouse-Nonce: a nonce of the target; Lighthouse-Proof: proves that the target knows the quorum's secret
    200  the head of the encoding and the checksum of each piece, which define the state
         Lighthouse-Proof: proves that the source also knows the secret
    GET /pieces/{layout}/{start}-{stop},.../{quorum_id}/{step}/{group_rank}?wait_s=...
    200  these bytes of the encoding, counted from the end of the head. `layout` is a digest of the tensors' dtypes and
         shapes, and is equal for states whose pieces have the same positions
    409  another state or none is available: JSON {"asked": key, "held": key or null}. Sent after up to `wait_s`,
         because a target may ask before the source has its state, or immediately if the source will never have it
    410  the state contains something that cannot be sent, which the text names; with the source's Lighthouse-Proof
    403  the target has not proved that it is a member of the quorum
    412  the state under this key has another layout
    503  too many connections

Each side proves that it is a member of the quorum before a byte of the state is sent or used, so other processes can
neither read nor provide weights. A proof covers the address that the target called, and is valid for one request on one
connection, so a copied or relayed proof is useless. Like the gradients, the state itself is not encrypted and needs a
trusted network.

`StateServer` tracks the readers of each state. It can wait for them, or disconnect them by shutting down their sockets,
which also wakes a thread that is blocked in a send.
"""

import itertools
import json
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from agent_client.healing.connection import (
    CANNOT_BE_SENT,
    NONCE_HEADER,
    PROOF_HEADER,
    DeadlineSocket,
    Pace,
    StateKey,
)
from agent_client.state.codec import CHECKSUM_BYTES, Encoding, encode
from agent_client.state.tree import State
from lighthouse_protocol.identity import Address
from lighthouse_protocol.rules.access import SOURCE_WORD, TARGET_WORD, is_proven, prove

logger = logging.getLogger(__name__)

_ROUTE = re.compile(
    r"/(?:manifest|pieces/(?P<layout>[0-9a-f]{32})/(?P<ranges>[0-9,-]{1,10000}))"
    r"/(?P<quorum_id>[0-9]{1,20})/(?P<step>[0-9]{1,20})/(?P<group_rank>[0-9]{1,20})"
    r"(?:\?wait_s=(?P<wait_s>[0-9]{1,9}(?:\.[0-9]+)?))?"
)
_STRIPE = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")

HEADERS_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""Time limit in seconds for a reader to receive one chunk."""
MAX_WAIT_S = 60.0
"""Maximum time in seconds that a request may wait until its state is available."""
ABORT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_OF_A_HOST = 32
REFUSAL_TIMEOUT_S = 1.0
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_ACCEPT_RETRY_S = 0.05


class Listener(TCPServer):
    """TCP server that accepts connections in a daemon thread and serves each connection in its own thread.

    The number of connections is limited, in total and per host, so that other processes cannot exhaust this process's
    threads. A connection whose peer has proved its membership is never closed to make room for another. A forked child
    closes its copies of the sockets, so that peers notice when the parent dies.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, handler: Any, on_cut: Callable[[], None]) -> None:
        """Start listening on a free port and accepting connections.

        Args:
            host: Listen address, or an empty string for all addresses.
            handler: Class that handles a connection.
            on_cut: Called after a connection was closed to make room for another. It must wake waiting handlers.
        """
        self._on_cut = on_cut
        self._connections: dict[DeadlineSocket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.address_family = _family(host)
        try:
            super().__init__((host, 0), handler)
        except OSError as error:
            error.add_note(f"while listening for readers of the state on {host or '*'}")
            raise
        _listeners.add(self)
        self._acceptor = threading.Thread(target=self._accept, name="checkpoint-accept", daemon=True)
        self._acceptor.start()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            accepted, address = super().get_request()
            return DeadlineSocket(fileno=accepted.detach()), address
        except OSError as error:
            if not self._is_closed:
                logger.warning("cannot accept a connection for the state: %s", error)
                time.sleep(_ACCEPT_RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._admits(str(client_address[0])):
            with suppress(OSError):
                request.set_limits(REFUSAL_TIMEOUT_S)
                request.sendall(REFUSAL)
            return self.shutdown_request(request)
        serve = partial(self._serve, request, client_address)
        thread = threading.Thread(target=serve, name="checkpoint-stream", daemon=True)
        with self._lock:
            self._connections[request] = thread  # before the thread starts, so that a forked child closes it
            try:
                thread.start()
            except RuntimeError:
                del self._connections[request]
                raise
        return None

    def _admits(self, host: str) -> bool:
        """Return whether `host` may open another connection. If necessary, close a connection to make room.

        A connection is *unproven* until its peer has proved its membership. Close only an unproven connection, of the
        host that has most of them, and only if these outnumber all connections of `host`, including the new one. So no
        host can lock out readers by opening idle connections.
        """
        with self._lock:
            hosts = [_peer(connection) for connection in self._connections]
            waiting = [each for each in self._connections if not each.is_proven and not each.is_cut]
        own = hosts.count(host)
        if len(hosts) < MAX_CONNECTIONS and own < MAX_CONNECTIONS_OF_A_HOST:
            return True
        logger.warning("too many connections for the state: %d; refused one from %s", len(hosts), host)
        if not waiting or own >= MAX_CONNECTIONS_OF_A_HOST:
            return False
        [(most, count)] = Counter(map(_peer, waiting)).most_common(1)
        if most == host or count <= own + 1:
            return False
        victim = next(each for each in waiting if _peer(each) == most)
        victim.is_cut = True
        _shut_down_all({victim})
        self._on_cut()
        return True

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(JOIN_TIMEOUT_S)
        self.server_close()
        with self._lock:
            connections = dict(self._connections)
        _shut_down_all(connections)
        for thread in connections.values():
            thread.join(JOIN_TIMEOUT_S)

    def abandon(self) -> None:
        """Close this process's copies of the sockets in a forked child. The parent's connections stay open."""
        for held in [self.socket, *self._connections]:
            with suppress(OSError):
                os.close(held.detach())

    def _accept(self) -> None:
        while not self._is_closed:
            self.handle_request()

    def _serve(self, request: DeadlineSocket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            logger.info("lost the connection to %s, which was reading the state: %s", client_address, error)
        except Exception:
            logger.exception("cannot send the state to %s", client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                del self._connections[request]


def _peer(connection: socket.socket) -> str:
    with suppress(OSError):
        return str(connection.getpeername()[0])
    return ""


def _family(host: str) -> socket.AddressFamily:
    if host:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [listener.abandon() for listener in list(_listeners)])


class NotHeldError(Exception):
    """Raised if the requested state is not available. `held` is the key of the current state, or None."""

    def __init__(self, held: StateKey | None) -> None:
        super().__init__(f"held: {held}")
        self.held = held


class CannotBeSentError(Exception):
    """Raised if the requested state contains something that cannot be sent. `secret` is its quorum's secret."""

    def __init__(self, reason: str, secret: str) -> None:
        super().__init__(reason)
        self.secret = secret


class StrangerError(Exception):
    """Raised if a reader has not proved that it is a member of the state's quorum."""


@dataclass(slots=True, eq=False)
class StateOffer:
    key: StateKey
    encoding: Encoding
    unread: int | None = None  # number of bytes to send before the copy is dropped, or None for the current state
    secret: str = field(default="", repr=False)  # unless it is empty, readers must prove that they know it
    readers: set[DeadlineSocket] = field(default_factory=set[DeadlineSocket])
    targets: frozenset[str] = frozenset()  # replica_ids of the groups for which a copy is kept
    until: float = math.inf  # time after which no target needs the copy, by time.monotonic()


class StateServer:
    """Serves the current state and copies of earlier states, one thread per connection. All methods are thread-safe."""

    def __init__(self, bind_host: str, *, advertise: str) -> None:
        """Start listening on a free port.

        Args:
            bind_host: Listen address, or an empty string for all addresses.
            advertise: Address at which peers reach this host.
        """
        self._changed = threading.Condition()
        self._held: StateOffer | None = None
        self._withdrawn: StateOffer | None = None
        """The state whose readers `withdraw` is waiting for."""
        self._kept: dict[StateKey, StateOffer] = {}
        self._refused: tuple[StateKey, str, str] | None = None
        """Key of the state that cannot be sent, the reason, and the secret of its quorum."""
        self._closed_to = (0, -1)
        self._is_closed = False
        self._listener = Listener(bind_host, partial(_Handler, self), self._wake_requests)
        self.address = f"http://{Address(advertise.strip('[]'), self._listener.server_address[1])}"

    def publish(self, key: StateKey, state: State, secret: str = "") -> None:
        """Make `state` the current state. Its tensors are not copied and must not change until `withdraw` has returned.

        Args:
            key: Key under which readers request the state.
            state: The state.
            secret: Readers must prove that they know this secret. If it is empty, any client can read the state.

        Raises:
            TypeError, ValueError: The state contains something that cannot be sent. The previous state stays current.
        """
        encoding = encode(state)
        with self._changed:
            while self._held:
                self.withdraw()
            self._held = StateOffer(key, encoding, secret=secret)
            self._changed.notify_all()

    def withdraw(self, grace_s: float = 0.0) -> None:
        """Stop serving the current state. Disconnect readers that have not finished after `grace_s` seconds.

        When this returns, no thread is reading the state, so it may change again.

        Raises:
            TimeoutError: A reader's thread does not end, for example because a tensor's device hangs.
        """
        with self._changed:
            held, self._held = self._held, None
            self._withdrawn = held
            if held and not self._changed.wait_for(lambda: not held.readers, grace_s):
                _shut_down_all(held.readers)
                if not self._changed.wait_for(lambda: not held.readers, ABORT_TIMEOUT_S):
                    raise TimeoutError(f"the state of {held.key} is still being read {ABORT_TIMEOUT_S} s after its end")
            if self._withdrawn is held:
                self._withdrawn = None

    def keep(self, key: StateKey, state: State, targets: frozenset[str], until: float, secret: str = "") -> None:
        """Also serve a copy of a state, until each target has read it once or `drop_kept` drops it.

        Args:
            key: Key under which readers request the copy.
            state: The copy, which must not change.
            targets: replica_ids of the groups that need the copy.
            until: Time after which no target needs the copy, by time.monotonic().
            secret: See `publish`.
        """
        encoding = encode(state)
        with self._changed:
            unread = len(targets) * encoding.body_length
            self._kept[key] = StateOffer(key, encoding, unread, secret, targets=targets, until=until)
            self._changed.notify_all()

    def drop_kept(self, should_drop: Callable[[StateOffer], object]) -> None:
        """Stop serving the copies for which `should_drop` returns true, and disconnect their readers."""
        with self._changed:
            for kept in [each for each in self._kept.values() if should_drop(each)]:
                del self._kept[kept.key]
                _shut_down_all(kept.readers)

    def refuse(self, key: StateKey, reason: str, secret: str = "") -> None:
        """Answer requests for `key` with the `reason` why that state cannot be sent. For `secret`, see `publish`.

        Call `refuse_up_to` as well. Otherwise, each request first waits until its time limit.
        """
        with self._changed:
            self._refused = key, reason, secret
            self._changed.notify_all()

    def refuse_up_to(self, quorum_id: int, step: int) -> None:
        """Refuse requests for states up to this quorum and step immediately, unless the state is available.

        Without this, a request waits, because its state might still be published.
        """
        with self._changed:
            self._closed_to = max(self._closed_to, (quorum_id, step))
            self._changed.notify_all()

    def disconnect_readers(self) -> None:
        """Disconnect the readers of the current state immediately, even while `withdraw` is waiting for them."""
        with self._changed:
            for held in (self._held, self._withdrawn):
                _shut_down_all(held.readers if held else ())

    def close(self) -> None:
        """Refuse waiting requests, close the socket and all connections, and end all threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self.drop_kept(lambda _: True)
        self.withdraw()
        self._listener.close()

    # -- called by the handlers

    @contextmanager
    def reading(
        self, key: StateKey, wait_s: float, reader: DeadlineSocket, may_read: Callable[[str], bool]
    ) -> Generator[StateOffer, None, None]:
        """Yield the state under `key` once it is available. `reader` is registered as its reader within the context.

        `may_read` returns whether the reader has proved that it knows a given secret.

        Raises:
            NotHeldError: The state did not become available within `wait_s` seconds.
            CannotBeSentError: The state contains something that cannot be sent.
            StrangerError: `may_read` returned False.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._find(key) or key[:2] <= self._closed_to or reader.is_cut, wait_s
            )
            if (held := self._find(key)) is None:
                if self._refused is None or self._refused[0] != key:
                    raise NotHeldError(self._held.key if self._held else None)
                _, reason, secret = self._refused
                if secret and not may_read(secret):
                    raise StrangerError
                raise CannotBeSentError(reason, secret)
            if held.secret and not may_read(held.secret):
                raise StrangerError
            held.readers.add(reader)
        try:
            yield held
        finally:
            with self._changed:
                held.readers.discard(reader)
                self._changed.notify_all()

    def record_read(self, held: StateOffer, count: int) -> None:
        """Record that `count` bytes of `held` were read. Drop `held` if it is a copy and all targets have read it."""
        with self._changed:
            if held.unread is None:
                return
            held.unread -= count
            if held.unread <= 0 and self._kept.get(held.key) is held:
                del self._kept[held.key]

    def _find(self, key: StateKey) -> StateOffer | None:
        return self._held if self._held and self._held.key == key else self._kept.get(key)

    def _wake_requests(self) -> None:
        # Wake the waiting requests, so that they check whether their connection was cut.
        with self._changed:
            self._changed.notify_all()


def _shut_down_all(readers: Iterable[DeadlineSocket]) -> None:
    for reader in readers:
        with suppress(OSError):
            reader.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server_version = "lighthouse-checkpoint"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, states: StateServer, *request: Any) -> None:
        self._states = states
        self._nonce = ""
        super().__init__(*request)

    def handle_one_request(self) -> None:
        # The limit covers the whole request, so that a client cannot occupy a thread by sending slowly.
        self.connection.set_limits(min(HEADERS_TIMEOUT_S, STALL_TIMEOUT_S))
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.connection.set_limits(math.inf, STALL_TIMEOUT_S)
        return is_whole

    def do_GET(self) -> None:
        if self.path == "/challenge":
            self._nonce = secrets.token_hex(16)
            return self._start(200, {NONCE_HEADER: self._nonce, "Content-Length": 0})
        nonce, self._nonce = self._nonce, ""
        if (match := _ROUTE.fullmatch(self.path)) is None:
            return self.send_error(404)
        key = StateKey(*(int(match[name]) for name in StateKey._fields))
        wait_s = min(float(match["wait_s"] or 0), MAX_WAIT_S)
        nonces, proof = (nonce, self.headers.get(NONCE_HEADER, "")), self.headers.get(PROOF_HEADER, "")
        proven = (self._states.address, *key, *nonces)

        def is_member(secret: str) -> bool:
            return all(nonces) and is_proven(proof, secret, TARGET_WORD, *proven)

        try:
            with self._states.reading(key, wait_s, self.connection, is_member) as held:
                self.connection.is_proven = True
                headers = {PROOF_HEADER: prove(held.secret, SOURCE_WORD, *proven)}
                if match["layout"]:
                    self._send_pieces(held, headers, match["layout"], match["ranges"])
                else:
                    encoding = held.encoding
                    length = len(encoding.head) + encoding.pieces * CHECKSUM_BYTES
                    self._start(200, {"Content-Length": length, **headers})
                    self._write(held, itertools.chain([encoding.head], encoding.checksums()))
        except NotHeldError as error:
            self._refuse(409, key, error.held)
        except CannotBeSentError as error:
            self._answer_text(CANNOT_BE_SENT, str(error), {PROOF_HEADER: prove(error.secret, SOURCE_WORD, *proven)})
        except StrangerError:
            logger.warning("refused %s the state of %s: it is not a member of that quorum", self.client_address[0], key)
            self._refuse(403, key, None)
        return None

    def _send_pieces(self, held: StateOffer, headers: dict[str, Any], layout: str, ranges: str) -> None:
        encoding = held.encoding
        found = [_STRIPE.fullmatch(part) for part in ranges.split(",")]
        stripes = [(int(part[1]), int(part[2])) for part in found if part is not None]
        end = encoding.body_length
        if layout != encoding.layout or None in found or not all(first < last <= end for first, last in stripes):
            return self._refuse(412, held.key, held.key)
        length = sum(last - first for first, last in stripes)
        self._start(200, {"Content-Type": "application/octet-stream", "Content-Length": length, **headers})
        self._write(held, (chunk for first, last in stripes for chunk in encoding.stripe(first, last)))
        self._states.record_read(held, length)
        logger.debug("sent %d bytes of the state of %s to %s", length, held.key, self.client_address)
        return None

    def _write(self, held: StateOffer, chunks: Iterable[bytes | memoryview]) -> None:
        pace = Pace() if held.unread is not None else None  # no group is waiting for the reader of a copy
        for chunk in chunks:
            self.wfile.write(chunk)
            if pace is not None:
                pace.rest()

    def _refuse(self, status: int, asked: StateKey, held: StateKey | None) -> None:
        keys = {"asked": asked._asdict(), "held": held and held._asdict()}
        self._answer_text(status, json.dumps(keys), {"Content-Type": "application/json"})

    def _answer_text(self, status: int, text: str, headers: dict[str, Any]) -> None:
        body = text.encode()
        self._start(status, {"Content-Length": len(body), **headers})
        self.wfile.write(body)

    def _start(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.client_address, *args)
