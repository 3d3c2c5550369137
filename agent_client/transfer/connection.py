"""A TCP connection under one deadline, to whichever address of a host answers; and how such hosts are named."""

import math
import socket
import time
from typing import Any
from urllib.parse import urlsplit


class DeadlineSocket(socket.socket):
    """A deadline (time.monotonic) over all its operations, however slowly bytes drip in; `silence_s` bounds each."""

    deadline: float = 0.0
    silence_s: float = 0.0
    is_proven: bool = False
    """Its other end has shown that it is a member of the quorum. For a server."""
    is_cut: bool = False
    """The server has ended it, to make room."""

    def begin(self, within_s: float, silence_s: float = math.inf) -> None:
        """All that follows is to be over within that time, and each operation within `silence_s`."""
        self.deadline, self.silence_s = time.monotonic() + within_s, silence_s

    def connect(self, address: Any) -> None:
        self._arm()
        super().connect(address)

    def sendall(self, *args: Any) -> None:
        self._arm()
        super().sendall(*args)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._arm()
        return super().recv_into(*args, **kwargs)

    def _arm(self) -> None:
        if (left_s := self.deadline - time.monotonic()) <= 0:
            raise TimeoutError("the deadline has passed")
        limit_s = min(left_s, self.silence_s)
        self.settimeout(limit_s if limit_s < math.inf else None)


def connect(host: str, port: int, deadline: float, silence_s: float) -> DeadlineSocket:
    """To the first address of `host` that answers; each gets an equal share of the time that is left."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for tried, (family, kind, protocol, _, address) in enumerate(found):
        connection = DeadlineSocket(family, kind, protocol)
        share_s = min(silence_s, deadline - time.monotonic()) / (len(found) - tried)
        connection.deadline, connection.silence_s = time.monotonic() + share_s, silence_s
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            connection.deadline = deadline
            return connection
    raise failure or OSError(f"{host} has no address")


def split_address(address: str) -> tuple[str, int]:
    """ValueError for anything but http://host:port."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError(f"{address!r} is not the address of a checkpoint server, which is http://host:port")
    return parts.hostname, parts.port


def host_in_url(host: str) -> str:
    """IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
