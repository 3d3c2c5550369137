"""The target's side of http.py: one GET under one deadline, without proxies, and errors that name the source."""

import http.client
import socket
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from agent_client.checkpoint.format import MAX_HEADER_BYTES, CorruptState, TruncatedState, decode
from agent_client.checkpoint.shelf import StateKey
from agent_client.checkpoint.tree import State

_WAIT_SHARE = 0.9
"""Of the timeout the source may wait for its snapshot, so that its refusal arrives before the deadline."""
_MAX_REFUSAL_BYTES = 2000


class StateUnavailable(Exception):
    """The source does not serve this state: it refused, is gone, or never was there."""


def fetch(
    address: str,
    key: tuple[int, int, int],
    timeout_s: float,
    *,
    wait_s: float | None = None,
    max_bytes: int | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> State:
    """The state that `address` (http://host:port) holds under `key`, its tensors on the CPU.

    `wait_s`: how long the source may wait for that key to be published; by default most of `timeout_s`, which bounds
    all but the resolution of a host name. Raises TimeoutError, StateUnavailable (ask the next quorum for a source),
    CorruptState (of which nothing was used), ValueError for a malformed address.
    """
    host, port = _split(address)
    wanted = StateKey(*key)
    wait_s = timeout_s * _WAIT_SHARE if wait_s is None else wait_s
    path = f"/checkpoint/{wanted.quorum_id}/{wanted.step}/{wanted.group_rank}?wait_s={wait_s:.3f}"
    with _naming_the_source(address, wanted, timeout_s), closing(http.client.HTTPConnection(host, port)) as connection:
        connection.sock = _connect(host, port, time.monotonic() + timeout_s)
        connection.request("GET", path)
        with connection.getresponse() as response:
            length = _check(response, max_bytes)
            return decode(response, length, max_header_bytes=max_header_bytes)


def host_in_url(host: str) -> str:
    """IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class _DeadlineSocket(socket.socket):
    """A socket with one deadline (time.monotonic) over all its operations, however slowly bytes drip in."""

    deadline: float = 0.0

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
        self.settimeout(left_s)


def _connect(host: str, port: int, deadline: float) -> _DeadlineSocket:
    """To the first address of `host` that answers; each gets an equal share of the time that is left."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for tried, (family, kind, protocol, _, address) in enumerate(found):
        left_s = deadline - time.monotonic()
        connection = _DeadlineSocket(family, kind, protocol)
        connection.deadline = time.monotonic() + left_s / (len(found) - tried)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            connection.deadline = deadline
            return connection
    raise failure or OSError(f"{host} has no address")


def _check(response: http.client.HTTPResponse, max_bytes: int | None) -> int:
    """The length of a response that may be decoded."""
    if response.status != 200:
        text = response.read(_MAX_REFUSAL_BYTES).decode(errors="replace")
        raise StateUnavailable(f"it answered {response.status}: {text}")
    if response.length is None:
        raise CorruptState("the answer has no valid Content-Length")
    if max_bytes is not None and response.length > max_bytes:
        raise CorruptState(f"the answer has {response.length} bytes, more than {max_bytes}")
    return response.length


@contextmanager
def _naming_the_source(address: str, key: StateKey, timeout_s: float) -> Generator[None, None, None]:
    what = f"the state of {key} from {address}"
    try:
        yield
    except TimeoutError as error:
        advice = "Look whether that process is alive and the network between; a longer heal timeout helps slow links."
        raise TimeoutError(f"{what} did not arrive within {timeout_s:g} s. {advice}") from error
    except TruncatedState as error:
        raise StateUnavailable(f"{what}: {error}, because the source withdrew it or has ended") from error
    except CorruptState as error:
        raise CorruptState(f"{what} cannot be used, nothing of it was: {error}") from error
    except StateUnavailable as error:
        raise StateUnavailable(f"{what} is not there: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise StateUnavailable(f"{what} cannot be had, no checkpoint server answers there: {error}") from error


def _split(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError(f"{address!r} is not the address of a checkpoint server, which is http://host:port")
    return parts.hostname, parts.port
