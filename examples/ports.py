"""Ports for servers that must be told theirs before they start."""

import random
import socket

LOOPBACK = "127.0.0.1"
# Below those that Linux gives to outgoing connections, so that none takes a port before its server has started; and
# below the default ports of torch and of our daemons.
PORTS = range(15_000, 29_000)

_random = random.SystemRandom()  # a program that seeds its random numbers keeps them


def free_port(host: str = LOOPBACK) -> int:
    """Draw a port that no process listens on, and claim it until this process ends.

    No other caller on this host gets it, in whatever process: of several test runs, each has its own.
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
    """An abstract name stands for the port: the kernel gives it to one socket at a time, and frees it at its end."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0lighthouse-ft/port/{port}")
    except OSError:
        claim.close()
        return False
    claim.detach()  # stays open until this process ends
    return True
