"""Free ports for servers that need their port number before they start."""

import random
import socket

LOOPBACK = "127.0.0.1"
# Below the ports that Linux assigns to outgoing connections, because one of these could occupy the port before the
# server starts. Also below the default ports of torch and of our daemons.
PORTS = range(15_000, 29_000)

_random = random.SystemRandom()  # does not change the program's seeded random numbers


def free_port(host: str = LOOPBACK) -> int:
    """Draw a port that no process listens on, and claim it until this process ends.

    No other call on this host returns the same port, so several test runs can share the host.
    """
    while True:
        port = _random.choice(PORTS)
        if _is_free(host, port) and _claim(port):
            return port


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _claim(port: int) -> bool:
    """Bind an abstract socket name that stands for the port. The kernel frees it when the process ends."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0lighthouse-ft/port/{port}")
    except OSError:
        claim.close()
        return False
    claim.detach()  # stays open until this process ends
    return True
