"""Connections for the transfer of state: sockets with a deadline, checks of a response, and a pace for background work.

`connect` opens a socket to a host of which any address may answer. `check_source` and `check_answer` are called before
any byte of a response is used. `Pace` slows down a thread for whose transfer no group waits.
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
from lighthouse_protocol.rules.access import is_proven


class StateKey(NamedTuple):
    quorum_id: int  # the quorum that assigned the readers
    step: int
    group_rank: int

    def __str__(self) -> str:
        return f"quorum {self.quorum_id} step {self.step} group rank {self.group_rank}"


class DeadlineSocket(socket.socket):
    """A socket with a time limit for all its operations together, and one for each of them."""

    deadline: float = 0.0  # end of all operations, by time.monotonic()
    silence_s: float = 0.0  # limit of each operation
    is_proven: bool = False  # the peer has proved that it is a member of the quorum; only set by a server
    is_cut: bool = False  # the server has closed it to make room

    def begin(self, within_s: float, silence_s: float = math.inf) -> None:
        """Set the limits: `within_s` for all following operations together, and `silence_s` for each."""
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
    """Connect to the first address of `host` that answers. The addresses share the remaining time equally.

    The limits also apply to later operations of the socket.
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
    """Return host and port of an address http://host:port. Raises ValueError for any other form."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError(f"{address!r} is not the address of a checkpoint server, which is http://host:port")
    return parts.hostname, parts.port


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


_MAX_REFUSAL_BYTES = 2000
CANNOT_BE_SENT = 410  # HTTP status: a retry would not help
NONCE_HEADER, PROOF_HEADER = "Lighthouse-Nonce", "Lighthouse-Proof"


class StateUnavailable(Exception):
    """No source serves this state."""


class StateRefused(StateUnavailable):
    """The state contains something that cannot be sent, so a retry would not help."""


def check_challenge(response: HTTPResponse) -> str:
    _check_status(response, 200)
    response.read()
    return response.getheader(NONCE_HEADER, "")


def check_source(response: HTTPResponse, secret: str, *words: str | int) -> None:
    """Check that the response comes from a member of the quorum: its proof must cover `words`.

    Nothing is checked if `secret`, the quorum's, is empty. Raises StateUnavailable.
    """
    matters = response.status < 300 or response.status == CANNOT_BE_SENT
    if secret and matters and not is_proven(response.getheader(PROOF_HEADER, ""), secret, *words):
        raise StateUnavailable("it did not prove that it is a member of the quorum; its data is not used")


def check_answer(response: HTTPResponse, length: int | None = None) -> None:
    """Check that the source sends a state, and the length of the body unless `length` is None."""
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


NICENESS = 10
WORKS_S = 0.002
"""Minimum CPU seconds between two rests."""


class Pace:
    """Slows down a thread for whose result no group waits, to leave CPU and memory bandwidth to the training threads.

    The thread gets a lower priority and, with `rest`, works at most half of the time. The priority alone would not
    help: the thread would use every idle core, and its memory traffic slows down all threads.
    """

    def __init__(self) -> None:
        """Lower the priority of the calling thread, if the system has priorities of threads (Linux)."""
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """Sleep for the CPU time that the thread has used since its last rest, if it is at least WORKS_S."""
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= WORKS_S:
            time.sleep(worked_s)
            self._rested_at = time.thread_time()
