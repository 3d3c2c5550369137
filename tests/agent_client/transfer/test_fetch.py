"""A transfer that breaks goes on where it broke; a source that fails gives way to the next; nothing bad is taken."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from agent_client.state.decoding import CorruptState, encode
from agent_client.state.encoding import Encoding
from agent_client.state.snapshot import StateMismatch, install_matches
from agent_client.transfer.fetch import Fetch
from agent_client.transfer.response import StateUnavailable
from agent_client.transfer.rules.source_order import TRIES
from agent_client.transfer.server import StateServer
from tests.agent_client.state.trees import same
from tests.agent_client.transfer.sources import answering, eventually, ok, serving, threads, took

KEY = (7, 12, 0)
STATE = {"w": torch.arange(2**20, dtype=torch.int64), "step": 12}
CONTENT = b"".join(encode(STATE))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    assert eventually(lambda: not threads()), threads()


def from_first(*addresses: str, timeout_s: float = 20.0, expected: Any = STATE, **options: Any) -> Fetch:
    sources = {address: lambda address=address: address for address in addresses}
    return Fetch(sources, KEY, timeout_s, accept=lambda state: install_matches(expected, state), **options)


class Proxy:
    """Passes a source's bytes on, and cuts each connection after so many."""

    def __init__(self, address: str, *cut_after_bytes: int) -> None:
        host, port = address.removeprefix("http://").rsplit(":", 1)
        self._target = (host, int(port))
        self._cuts = list(cut_after_bytes)
        self.requests: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def ranges(self) -> list[int]:
        """From which byte each request asked."""
        found = [re.search(r"Range: bytes=(\d+)-", request) for request in self.requests]
        return [int(match[1]) if match else 0 for match in found]

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with near, socket.create_connection(self._target, 5) as far:
                self._pass_on(near, far)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        request = near.recv(4096)
        self.requests.append(request.decode())
        far.sendall(request)
        left = self._cuts.pop(0) if self._cuts else len(CONTENT) * 2
        while left and (data := far.recv(min(left, 65536))):
            near.sendall(data)
            left -= len(data)


@contextmanager
def proxy(server: StateServer, *cut_after_bytes: int) -> Iterator[Proxy]:
    with closing(Proxy(server.address, *cut_after_bytes)) as it:
        yield it


class TestBrokenConnection:
    def test_goes_on_at_the_byte_where_it_broke(self) -> None:
        with serving() as server, proxy(server, 10, 3_000_000, 1_000_000, 2_000_000) as between:
            server.publish(KEY, STATE)
            assert same(from_first(between.address).run(), STATE)
        ranges = between.ranges()
        assert ranges[:2] == [0, 0], "the first one broke in the head of the answer"
        assert len(ranges) == 5
        assert 0 < ranges[2] < ranges[3] < ranges[4] < len(CONTENT)
        assert ranges[2] > 2_900_000
        assert ranges[4] - ranges[2] > 900_000

    def test_another_state_in_its_place_is_not_mixed_in(self) -> None:
        """The source has published anew under the same key: the old part is of no use."""
        with serving() as server, proxy(server, 3_000_000) as between:
            server.publish(KEY, STATE)
            changed: list[None] = []

            def publish_anew(state: Any) -> None:
                raise AssertionError("never reached")

            real = between._pass_on

            def pass_on_then_publish(near: socket.socket, far: socket.socket) -> None:
                real(near, far)
                if not changed:
                    changed.append(None)
                    server.publish(KEY, {"w": torch.zeros(2**20, dtype=torch.int64), "step": 12})

            between._pass_on = pass_on_then_publish  # type: ignore[method-assign]
            fetch = Fetch({"a": lambda: between.address}, KEY, 20, accept=publish_anew)
            with pytest.raises(StateUnavailable, match="from a is not there: it answered 412"):
                fetch.run()

    def test_bytes_that_differ_from_those_before_are_found(self) -> None:
        """A source that goes on with something else: the checksum of the piece tells."""
        cut = len(CONTENT) // 2

        def first_half(connection: socket.socket) -> None:
            connection.sendall(ok(len(CONTENT), CONTENT[:cut]))

        def other_half(connection: socket.socket) -> None:
            rest = f"bytes {cut}-{len(CONTENT) - 1}/{len(CONTENT)}"
            connection.sendall(
                f"HTTP/1.0 206 x\r\nContent-Range: {rest}\r\nContent-Length: {len(CONTENT) - cut}\r\n\r\n".encode()
            )
            connection.sendall(bytes(len(CONTENT) - cut))

        with answering(first_half, other_half) as address:
            with pytest.raises(CorruptState, match=f"{address} cannot be used, nothing of it was: the checksum"):
                from_first(address).run()

    @pytest.mark.parametrize("answer", ["bytes 5-8/9", "", "bytes 0-{last}/{length}"])
    def test_a_rest_of_something_else_is_refused(self, answer: str) -> None:
        cut, length = 1000, len(CONTENT)
        text = answer.format(last=length - 1, length=length)

        def rest(connection: socket.socket) -> None:
            head = f"HTTP/1.0 206 x\r\nContent-Range: {text}\r\nContent-Length: {length - cut}\r\n\r\n"
            connection.sendall(head.encode() + CONTENT[cut:])

        with answering(lambda connection: connection.sendall(ok(length, CONTENT[:cut])), rest) as address:
            with pytest.raises(CorruptState, match="asked for bytes 1000-"):
                from_first(address).run()

    def test_one_that_never_gets_on_is_given_up(self) -> None:
        with serving() as server, proxy(server, *[10] * 50) as between, took(0, 3):
            server.publish(KEY, STATE)
            with pytest.raises(StateUnavailable, match=rf"no checkpoint server .*\({TRIES} times in a row\)"):
                from_first(between.address).run()
        assert len(between.requests) == TRIES


def damaged(connection: socket.socket) -> None:
    connection.sendall(ok(len(CONTENT), CONTENT[:-1] + b"x"))


def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 20)


def oversized(connection: socket.socket) -> None:
    connection.sendall(ok(2**50, CONTENT))


def truncated(connection: socket.socket) -> None:
    connection.sendall(ok(len(CONTENT), CONTENT[: len(CONTENT) // 2]))


def refusing(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.0 409 Conflict\r\n\r\nno")


def misfit(connection: socket.socket) -> None:
    other = b"".join(encode({"w": torch.zeros(3), "step": 12}))
    connection.sendall(ok(len(other), other))


def silent(connection: socket.socket) -> None:
    connection.sendall(ok(len(CONTENT), CONTENT[:1000]))
    connection.recv(1)


BAD: list[Callable[[socket.socket], None]] = [damaged, garbage, oversized, truncated, refusing, misfit, silent]


class TestAnotherSource:
    @pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
    def test_is_tried(self, bad: Callable[[socket.socket], None]) -> None:
        with answering(bad) as address, serving() as server, took(0, 5):
            server.publish(KEY, STATE)
            assert same(from_first(address, server.address, silence_s=0.5).run(), STATE)

    def test_after_all_that_can_go_wrong(self) -> None:
        with serving() as server:
            server.publish(KEY, STATE)
            with answering(damaged) as one, answering(refusing) as two, answering(misfit) as three:
                assert same(from_first(one, "http://127.0.0.1:1", two, "nonsense", three, server.address).run(), STATE)

    def test_each_is_named_when_all_fail(self) -> None:
        with answering(damaged) as one, answering(refusing) as two:
            with pytest.raises(StateUnavailable) as caught:
                from_first(one, two, "http://127.0.0.1:1").run()
        for words in (
            f"from {one} cannot be used",
            f"from {two} is not there: it answered 409",
            "127.0.0.1:1 cannot be",
        ):
            assert words in str(caught.value)

    def test_one_kind_of_failure_keeps_its_class(self) -> None:
        with answering(misfit) as one, answering(misfit) as two:
            with pytest.raises(StateMismatch, match=r"\['w'\]: shape"):
                from_first(one, two).run()

    def test_what_finds_the_address_may_fail(self) -> None:
        def fail() -> str:
            raise ConnectionError("the manager is gone")

        with serving() as server:
            server.publish(KEY, STATE)
            sources = {"a": fail, "b": lambda: server.address}
            assert same(Fetch(sources, KEY, 20, accept=lambda _: None).run(), STATE)

    def test_what_a_bad_source_has_sent_is_let_go(self) -> None:
        """Or else healing takes the memory of two states."""
        content = b"".join(encode(torch.ones(64 * 2**20, dtype=torch.uint8)))
        damaged = content[:-1] + b"x"
        alive: list[int] = []

        def accept(_: Any) -> None:
            alive.append(len({tensor.data_ptr() for tensor in tensors_alive() if tensor.numel() >= 2**26}))

        with answering(lambda connection: connection.sendall(ok(len(content), damaged))) as one, serving() as server:
            server.publish(KEY, torch.zeros(64 * 2**20, dtype=torch.uint8))
            sources = {"a": lambda: one, "b": lambda: server.address}
            Fetch(sources, KEY, 20, accept=accept).run()
        assert alive == [2], "the source's own, and what has arrived"


def tensors_alive() -> Iterator[torch.Tensor]:
    return (found for found in gc.get_objects() if type(found) is torch.Tensor)


SOURCE = """
import os, signal, sys, time, torch
from agent_client.state.encoding import Encoding
from agent_client.transfer.server import StateServer

def chunks_then_signal(encoding, start, chunks=Encoding.chunks):
    for number, chunk in enumerate(chunks(encoding, start)):
        if number == 3:
            os.kill(os.getpid(), int(sys.argv[1]))
        yield chunk

Encoding.chunks = chunks_then_signal
server = StateServer("127.0.0.1", advertise="127.0.0.1", chunk_bytes=2**20)
server.publish((7, 12, 0), {"w": torch.arange(2**20, dtype=torch.int64), "step": 12})
print(server.address, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_source_that_dies_mid_stream_is_replaced(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SOURCE, str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as source, serving() as server:
        assert source.stdout
        address = source.stdout.readline().strip()
        server.publish(KEY, STATE)
        with took(0, 5):
            assert same(from_first(address, server.address, silence_s=1.0).run(), STATE)
        os.kill(source.pid, signal.SIGKILL)


class TestCancel:
    def test_ends_a_transfer_at_once(self) -> None:
        with answering(silent) as address, ThreadPoolExecutor(1) as pool, took(0.2, 3):
            fetch = from_first(address)
            running = pool.submit(fetch.run)
            time.sleep(0.2)
            assert not running.done()
            fetch.cancel("the quorum was revoked")
            with pytest.raises(StateUnavailable, match="given up: the quorum was revoked"):
                running.result(2)

    def test_before_it_begins(self) -> None:
        with serving() as server:
            server.publish(KEY, STATE)
            fetch = from_first(server.address)
            fetch.cancel("revoked")
            with pytest.raises(StateUnavailable, match="given up: revoked"):
                fetch.run()

    def test_no_other_source_is_asked_then(self) -> None:
        with answering(silent) as address, serving() as server, ThreadPoolExecutor(1) as pool:
            server.publish(KEY, STATE)
            fetch = from_first(address, server.address, silence_s=10)
            running = pool.submit(fetch.run)
            time.sleep(0.2)
            fetch.cancel("revoked")
            with pytest.raises(StateUnavailable, match="given up: revoked"):
                running.result(2)


class TestInPlace:
    """What is read in place is written when nobody reads it."""

    def slow_chunks(self, monkeypatch: pytest.MonkeyPatch, pause_s: float) -> threading.Event:
        began = threading.Event()

        def chunks(encoding: Encoding, start: int, real: Any = Encoding.chunks) -> Iterator[memoryview]:
            for chunk in real(encoding, start):
                began.set()
                time.sleep(pause_s)
                yield chunk

        monkeypatch.setattr(Encoding, "chunks", chunks)
        return began

    def test_but_not_longer_than_it_may(self, monkeypatch: pytest.MonkeyPatch) -> None:
        began = self.slow_chunks(monkeypatch, 0.3)
        with serving(chunk_bytes=2**19) as server, ThreadPoolExecutor(1) as pool:
            server.publish(KEY, STATE)
            running = pool.submit(from_first(server.address).run)
            assert began.wait(5)
            with took(0.4, 3):
                server.withdraw(grace_s=0.5)
            with pytest.raises(StateUnavailable):
                running.result(5)

    def test_a_revoke_ends_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        began = self.slow_chunks(monkeypatch, 0.3)
        with serving(chunk_bytes=2**19) as server, ThreadPoolExecutor(2) as pool:
            server.publish(KEY, STATE)
            fetch = from_first(server.address)
            running = pool.submit(fetch.run)
            assert began.wait(5)
            waiting = pool.submit(server.withdraw, 60)
            time.sleep(0.1)
            server.cut_off()
            with took(0, 2):
                waiting.result(5)
            fetch.cancel("revoked")
            with pytest.raises(StateUnavailable):
                running.result(5)
