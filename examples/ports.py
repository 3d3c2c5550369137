"""Ports for servers that must be told theirs before they start."""

import random
import socket

LOOPBACK = "127.0.0.1"
# Below those that Linux gives to connections that go out: none of them takes it before the server has started.
PORTS = range(15_000, 32_000)

_drawn: set[int] = set()
_random = random.SystemRandom()  # a forked child must not draw what its parent draws


def free_port(host: str = LOOPBACK) -> int:
    """One where nobody listens, and never the same twice in this process."""
    while True:
        port = _random.choice(PORTS)
        if port not in _drawn and _is_free(host, port):
            _drawn.add(port)
            return port


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
