"""Connections for copying a state: sockets with a deadline, validation of responses, and throttled background work.

`connect` tries all addresses of a host. `check_answer` must be called before the body of a response is used. `Pace`
slows down transfers for which no group is waiting.
"""

import contextlib
import math
import os
import socket
import threading
import time
from http.client import HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agent_client.state.tree import CorruptState


class StateKey(NamedTuple):
    quorum_id: int  # quorum that assigned the source and its targets
    step: int
    group_rank: int

    def __str__(self) -> str:
        return f"quorum {self.quorum_id} step {self.step} group rank {self.group_rank}"


class DeadlineSocket(socket.socket):
    """A socket with a time limit for all its operations together, and a second time limit for each operation."""

    deadline: float = 0.0  # when all operations must have ended, by time.monotonic()
    silence_s: float = 0.0  # time limit of each operation in seconds
    is_proven: bool = False  # the peer has proved that it is a member of the quorum; only set by a server
    is_cut: bool = False  # the server has closed this connection to make room for another

    def set_limits(self, within_s: float, silence_s: float = math.inf) -> None:
        """Set the time limits in seconds: `within_s` for all following operations together, `silence_s` for each."""
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
    """Connect to the first address of `host` that answers. Each address gets an equal share of the remaining time.

    `deadline` is a time of time.monotonic(). `silence_s` is the time limit of each socket operation in seconds.
    """
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
    """Return the host and port of an address of the form http://host:port. Raise ValueError for any other form."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError(f"{address!r} is not the address of a checkpoint server, which is http://host:port")
    return parts.hostname, parts.port


_MAX_REFUSAL_BYTES = 2000
CANNOT_BE_SENT = 410  # HTTP status if the source has the state but cannot send it
NONCE_HEADER, PROOF_HEADER = "Lighthouse-Nonce", "Lighthouse-Proof"


class StateUnavailable(Exception):
    """Raised if the requested state is not available from a source, or from any source."""


class StateRefused(StateUnavailable):
    """Raised if the state contains something that cannot be sent, so a retry would not help."""


def check_answer(response: HTTPResponse, length: int | None = None) -> None:
    """Raise StateUnavailable unless the status is 200, and CorruptState if the body does not have `length` bytes."""
    if response.status != 200:
        is_refusal = response.status >= 400
        text = response.read(_MAX_REFUSAL_BYTES).decode(errors="replace") if is_refusal else "not 200"
        if response.status == CANNOT_BE_SENT:
            raise StateRefused(f"the source cannot send its state: {text}")
        raise StateUnavailable(f"it answered {response.status}: {text}")
    if length not in (None, response.length):
        raise CorruptState(f"asked for {length} bytes, the answer has {response.length}")


NICENESS = 10
WORKS_S = 0.002
"""Minimum CPU time in seconds between two rests."""


class Pace:
    """Slows down the calling thread, to leave CPU time and memory bandwidth to the training.

    The thread gets a lower priority and, with `rest`, works at most half of the time. The priority alone is not enough,
    because the thread would still use idle cores, and its memory traffic slows down all threads.
    """

    def __init__(self, niceness: int = NICENESS) -> None:
        """Lower the priority of the calling thread by `niceness` if the system supports this (Linux)."""
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """If the thread has used at least WORKS_S of CPU time since its last rest, sleep for an equal time."""
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= WORKS_S:
            time.sleep(worked_s)
            self._rested_at = time.thread_time()
