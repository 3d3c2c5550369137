"""Sources of a state, ours and ill-behaved ones, and what a test says about how long they take."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from agent_client.healing.connection import StateKey, split_address
from agent_client.healing.fetch import Fetch
from agent_client.healing.server import StateServer
from agent_client.state.codec import Encoding

KEY = StateKey(7, 12, 0)

Script = Callable[[socket.socket], object]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")}


@contextmanager
def serving(
    state: Any = None, *, secret: str = "", bind_host: str = "127.0.0.1", advertise: str = "127.0.0.1"
) -> Iterator[StateServer]:
    """`state`: what it has under KEY."""
    with closing(StateServer(bind_host, advertise=advertise)) as it:
        if state is not None:
            it.publish(KEY, state, secret)
        yield it


def connected(address: str) -> socket.socket:
    """A connection that asks for nothing."""
    return socket.create_connection(split_address(address), 30)


def fetch(address: str, key: StateKey, timeout_s: float, **options: Any) -> Any:
    """The state that `address` holds under `key`, whatever it is."""
    return Fetch({address: lambda: address}, key, timeout_s, accept=lambda _: None, **options).run()


@contextmanager
def took(at_least_s: float, at_most_s: float) -> Iterator[None]:
    began_at = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - began_at <= at_most_s


@contextmanager
def answering(*scripts: Script) -> Iterator[str]:
    """The address of a source that does with each request what the next of `scripts` says; with more, the last."""

    def serve() -> None:
        for script in itertools.chain(scripts, itertools.repeat(scripts[-1])):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                take_request(connection)
                script(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = threading.Thread(target=serve)
        source.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            source.join(30)
            assert not source.is_alive()


def bytes_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each chunk that sources of this process send from now on, other targets not among them."""
    found: list[int] = []

    def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
        for chunk in real(encoding, start, stop):
            found.append(len(chunk))
            yield chunk

    monkeypatch.setattr(Encoding, "stripe", stripe)
    return found


def sends(answer: bytes) -> Script:
    return lambda connection: connection.sendall(answer)


def take_request(connection: socket.socket) -> str:
    request = b""
    while not request.endswith(b"\r\n\r\n") and (more := connection.recv(4096)):
        request += more
    return request.decode()


def ok(length: object, body: bytes) -> bytes:
    return f"HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + body
