"""A TCP connection under one deadline, to whichever address of a host answers; and how such hosts are named."""

import contextlib
import math
import os
import socket
import threading
import time
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from agent_client.state.tree import CorruptState
from lighthouse_protocol.rules.access import is_proven


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


# -- response -----------------------------------------------------------------
#
# What a source's answer must say before a byte of its body is used.

_MAX_REFUSAL_BYTES = 2000
CANNOT_BE_SENT = 410
NONCE_HEADER, PROOF_HEADER = "Lighthouse-Nonce", "Lighthouse-Proof"


class StateUnavailable(Exception):
    """No source serves this state: it refused, is gone, or never was there."""


class StateRefused(StateUnavailable):
    """The source has the state, and it holds something that cannot be sent; no other attempt would help."""


def check_challenge(response: HTTPResponse) -> str:
    """The source's nonce."""
    _check_status(response, 200)
    response.read()
    return response.getheader(NONCE_HEADER, "")


def check_source(response: HTTPResponse, secret: str, *words: str | int) -> None:
    """Raises unless the answer comes from a member of the quorum, to this very request."""
    matters = response.status < 300 or response.status == CANNOT_BE_SENT
    if secret and matters and not is_proven(response.getheader(PROOF_HEADER, ""), secret, *words):
        raise StateUnavailable("it did not prove that it is a member of the quorum; its data is not used")


def check_answer(response: HTTPResponse, length: int | None = None) -> None:
    """Raises unless it answers, with so many bytes."""
    _check_status(response, 200)
    if length not in (None, response.length):
        raise CorruptState(f"asked for {length} bytes, the answer has {response.length}")


def _check_status(response: HTTPResponse, expected: int) -> None:
    if response.status != expected:
        is_refusal = response.status >= 400
        text = response.read(_MAX_REFUSAL_BYTES).decode(errors="replace") if is_refusal else f"not {expected}"
        if response.status == CANNOT_BE_SENT:
            raise StateRefused(f"the source cannot send its state: {text}")
        raise StateUnavailable(f"it answered {response.status}: {text}")


# -- priority -----------------------------------------------------------------
#
# A thread that nobody waits for leaves the processor, and the memory's bandwidth, to those that train.

NICENESS = 10
WORKS_S = 0.002
"""At least, between two rests."""


class Pace:
    """Made by such a thread: from then on it has a lower priority, where the system has one for each thread (Linux),
    and with `rest` it works for half of its time at most. A priority alone would leave it all that is idle; and what
    one thread does to the memory, the others feel whatever its priority."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """For as long as the thread has had a processor since it rested last."""
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= WORKS_S:
            time.sleep(worked_s)
            self._rested_at = time.thread_time()
