"""A TCP server that accepts and serves connections in separate threads and can end all of them.

The number of connections is limited, in total and per host, so that strangers cannot exhaust this process's threads. A
connection whose peer has proved its membership is never closed to make room for another. A forked child closes its
copies of the sockets, so that peers notice when the parent dies.
"""

import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from socketserver import TCPServer
from typing import Any

from agent_client.healing.connection import DeadlineSocket
from lighthouse_protocol.identity import Address

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_OF_A_HOST = 32
REFUSAL_TIMEOUT_S = 1.0
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_ACCEPT_RETRY_S = 0.05


class Listener(TCPServer):
    """Accepts connections in a daemon thread, and serves each in another."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: Any, on_cut: Callable[[], None] = lambda: None) -> None:
        """Listen on `host` (empty: all addresses) and `port` (0: a free one), and start to accept.

        After a connection was marked with `is_cut`, `on_cut` is called, so that a waiting handler checks the mark.
        """
        self._on_cut = on_cut
        self._connections: dict[DeadlineSocket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.address_family = _family(host)
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            error.add_note(f"while listening for readers of the state on {Address(host or '*', port)}")
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
        if self._is_full(client_address) and not self._makes_room(client_address):
            with suppress(OSError):
                request.begin(REFUSAL_TIMEOUT_S)
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

    def _is_full(self, client_address: Any) -> bool:
        with self._lock:
            hosts = [_peer(connection) for connection in self._connections]
        if len(hosts) < MAX_CONNECTIONS and hosts.count(client_address[0]) < MAX_CONNECTIONS_OF_A_HOST:
            return False
        logger.warning("too many connections for the state: %d; refused one from %s", len(hosts), client_address[0])
        return True

    def _makes_room(self, client_address: Any) -> bool:
        """Make room for a client by closing a connection of another host whose peer has not proved its membership.

        The other host must have more of these than the client's host would then have connections. So strangers cannot
        keep a reader out with idle connections.
        """
        with self._lock:
            hosts = [_peer(connection) for connection in self._connections]
            waiting = [each for each in self._connections if not each.is_proven and not each.is_cut]
        if not waiting or hosts.count(client_address[0]) >= MAX_CONNECTIONS_OF_A_HOST:
            return False
        [(most, count)] = Counter(map(_peer, waiting)).most_common(1)
        if most == client_address[0] or count <= hosts.count(client_address[0]) + 1:
            return False
        victim = next(each for each in waiting if _peer(each) == most)
        victim.is_cut = True
        with suppress(OSError):
            victim.shutdown(socket.SHUT_RDWR)
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
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
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


def _abandon_all() -> None:
    for listener in list(_listeners):
        listener.abandon()


os.register_at_fork(after_in_child=_abandon_all)
