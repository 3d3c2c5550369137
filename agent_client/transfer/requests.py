"""A transfer's requests to its sources: connections under one deadline, which `cancel` ends from any thread."""

import http.client
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from agent_client.transfer.connection import DeadlineSocket, connect, split_address
from agent_client.transfer.offers import StateKey
from agent_client.transfer.response import NONCE_HEADER, PROOF_HEADER, check_challenge, check_source
from lighthouse_protocol.rules.proof import SOURCE_WORD, TARGET_WORD, prove

WAIT_SHARE = 0.9
"""Of its time the source may wait for its snapshot, so that its refusal arrives before that is over."""


class Requests:
    """For the state under `key`. `secret`: of the quorum; source and target prove to each other that they know it.
    Empty: neither does."""

    def __init__(self, key: StateKey, deadline: float, secret: str = "") -> None:
        self.key = key
        self.secret = secret
        self.deadline = deadline
        self.why_cancelled = ""
        self.on_cancel: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._open: set[Connection] = set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def connect(self, address: str, silence_s: float) -> "Connection":
        """`silence_s` bounds each operation. ConnectionError once this was cancelled."""
        host, port = split_address(address)
        connection = Connection(self, address, connect(host, port, self.deadline, silence_s))
        with self._lock:
            self._open.add(connection)
            is_cancelled = self._cancelled.is_set()
        if is_cancelled:
            connection.close()
            raise ConnectionError("cancelled")
        return connection

    def cancel(self, reason: str) -> None:
        """No connection is opened any more, and those that are open end."""
        with self._lock:
            if not self._cancelled.is_set():
                self.why_cancelled = reason
            self._cancelled.set()
            connections = list(self._open)
        for connection in connections:
            connection.cut()
        self.on_cancel()

    def wait_until(self, moment: float) -> None:
        """Or until this is cancelled."""
        self._cancelled.wait(max(0.0, moment - time.monotonic()))

    def forget(self, connection: "Connection") -> None:
        with self._lock:
            self._open.discard(connection)


class Connection:
    """To one source. One thread uses it; `cut` is for any."""

    def __init__(self, requests: Requests, address: str, opened: DeadlineSocket) -> None:
        self._requests = requests
        self._address = address
        self._socket = opened
        self._http = http.client.HTTPConnection(*split_address(address))
        self._http.sock = opened
        self._response: http.client.HTTPResponse | None = None

    def get(
        self, path: str, silence_s: float, headers: Mapping[str, str] | None = None, tag: str | None = None
    ) -> http.client.HTTPResponse:
        """The answer of a source that is a member of the quorum, or a refusal. `tag`: of the state that is gone on
        with; by default, the one that the answer names. What was answered before has been read."""
        requests, key = self._requests, self._requests.key
        self._socket.silence_s = silence_s
        nonces, sent = self._challenge(), dict(headers or {})
        if requests.secret:
            proof = prove(requests.secret, TARGET_WORD, self._address, *key, *nonces)
            sent |= {NONCE_HEADER: nonces[1], PROOF_HEADER: proof}
        self._http.request("GET", path, headers=sent)
        self._response = response = self._http.getresponse()
        told = response.getheader("ETag", "") if tag is None else tag
        check_source(response, requests.secret, SOURCE_WORD, self._address, *key, *nonces, told)
        return response

    def _challenge(self) -> tuple[str, str]:
        """The source's nonce, good for one request on this connection, and ours."""
        if not self._requests.secret:
            return "", ""
        self._http.request("GET", "/challenge")
        self._response = self._http.getresponse()
        return check_challenge(self._response), secrets.token_hex(16)

    def cut(self) -> None:
        """Whoever reads from it is told at once that it has ended."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._requests.forget(self)
        if self._response is not None:
            self._response.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def key_path(key: StateKey, wait_s: float) -> str:
    """How a path ends: which state, and how long the source may wait for it."""
    return f"{key.quorum_id}/{key.step}/{key.group_rank}?wait_s={wait_s:.3f}"
