"""A transfer that breaks goes on where it broke; a source that fails gives way to the next; nothing bad is taken."""

import gc
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from agent_client.state.codec import Encoding, encode
from agent_client.state.snapshot import StateMismatch, install_matches
from agent_client.state.tree import CorruptState
from agent_client.transfer.connection import StateUnavailable
from agent_client.transfer.fetch import Fetch
from agent_client.transfer.rules.source_order import TRIES
from tests.agent_client.state.trees import same
from tests.agent_client.transfer.sources import KEY, Script, answering, ok, sends, serving, threads, took
from tests.processes import eventually

STATE = {"w": torch.arange(2**20, dtype=torch.int64), "step": 12}
CONTENT = b"".join(encode(STATE))
CUT = len(CONTENT) // 2


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    assert eventually(lambda: not threads()), threads()


def from_first(*addresses: str, timeout_s: float = 60.0, expected: Any = STATE, **options: Any) -> Fetch:
    sources = {address: lambda address=address: address for address in addresses}
    return Fetch(sources, KEY, timeout_s, accept=lambda state: install_matches(expected, state), **options)


def rest(content_range: str, body: bytes) -> bytes:
    return f"HTTP/1.0 206 x\r\nContent-Range: {content_range}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class TestBrokenConnection:
    def test_goes_on_at_the_byte_where_it_broke(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts, began_at = [3_000_000, 1_000_000, 2_000_000], []

        def chunks(encoding: Encoding, start: int, real: Any = Encoding.chunks) -> Iterator[memoryview]:
            began_at.append(start)
            left = cuts.pop(0) if cuts else len(CONTENT)
            for chunk in real(encoding, start):
                yield chunk[:left]
                left -= len(chunk)
                if left < 0:
                    raise ConnectionResetError("cut by the test")

        monkeypatch.setattr(Encoding, "chunks", chunks)
        with serving(STATE, chunk_bytes=2**16) as server:
            assert same(from_first(server.address).run(), STATE)
        assert began_at == [0, 3_000_000, 4_000_000, 6_000_000]

    @pytest.mark.parametrize(
        ("second", "failure", "words"),
        [
            # It goes on with something else: the checksum of the piece tells.
            (rest(f"bytes {CUT}-{len(CONTENT) - 1}/{len(CONTENT)}", bytes(len(CONTENT) - CUT)), CorruptState, "checks"),
            (rest("bytes 5-8/9", CONTENT[CUT:]), CorruptState, f"asked for bytes {CUT}-"),
            (rest("", CONTENT[CUT:]), CorruptState, f"asked for bytes {CUT}-"),
            (rest(f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", CONTENT[CUT:]), CorruptState, f"asked for bytes {CUT}"),
            # It has published anew under the same key: the old part is of no use.
            (b"HTTP/1.0 412 x\r\n\r\n", StateUnavailable, "is not available: it answered 412"),
        ],
        ids=["other bytes", "another range", "no range", "from the beginning", "another state"],
    )
    def test_another_state_is_not_mixed_in(self, second: bytes, failure: type[Exception], words: str) -> None:
        with answering(sends(ok(len(CONTENT), CONTENT[:CUT])), sends(second)) as address:
            with pytest.raises(failure, match=f"from {address} .*{words}"):
                from_first(address).run()

    def test_one_that_never_gets_on_is_given_up(self) -> None:
        requests: list[socket.socket] = []

        def break_off(connection: socket.socket) -> None:
            requests.append(connection)
            connection.sendall(b"HTTP/1.0 2")

        with answering(break_off) as address, took(0, 30):
            with pytest.raises(StateUnavailable, match=rf"no checkpoint server .*\({TRIES} times in a row\)"):
                from_first(address).run()
        assert len(requests) == TRIES


def silent(connection: socket.socket) -> None:
    connection.sendall(ok(len(CONTENT), CONTENT[:1000]))
    connection.recv(1)


OTHER_MODEL = b"".join(encode({"w": torch.zeros(3), "step": 12}))

damaged = sends(ok(len(CONTENT), CONTENT[:-1] + b"x"))
refusing = sends(b"HTTP/1.0 409 Conflict\r\n\r\nno")
misfit = sends(ok(len(OTHER_MODEL), OTHER_MODEL))

BAD: dict[str, Script] = {
    "damaged": damaged,
    "garbage": sends(bytes(range(256)) * 20),
    "oversized": sends(ok(2**50, CONTENT)),
    "truncated": sends(ok(len(CONTENT), CONTENT[:CUT])),
    "refusing": refusing,
    "misfit": misfit,
    "silent": silent,
}


class TestAnotherSource:
    @pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
    def test_is_tried(self, bad: Script) -> None:
        with answering(bad) as address, serving(STATE) as server, took(0, 30):
            assert same(from_first(address, server.address, silence_s=0.5).run(), STATE)

    def test_each_is_named_when_all_fail(self) -> None:
        with answering(damaged) as one, answering(refusing) as two:
            with pytest.raises(StateUnavailable) as caught:
                from_first(one, two, "http://127.0.0.1:1").run()
        for words in (
            f"from {one} cannot be used",
            f"from {two} is not available: it answered 409",
            "127.0.0.1:1 is not available, no checkpoint server answers",
        ):
            assert words in str(caught.value)

    def test_one_kind_of_failure_keeps_its_class(self) -> None:
        with answering(misfit) as one, answering(misfit) as two:
            with pytest.raises(StateMismatch, match=r"\['w'\]: shape"):
                from_first(one, two).run()

    def test_what_finds_the_address_may_fail(self) -> None:
        def fail() -> str:
            raise ConnectionError("the manager is gone")

        with serving(STATE) as server:
            sources = {"a": fail, "b": lambda: server.address}
            assert same(Fetch(sources, KEY, 20, accept=lambda _: None).run(), STATE)

    def test_what_a_bad_source_has_sent_is_let_go(self) -> None:
        """Or else healing takes the memory of two states."""
        content = b"".join(encode(torch.ones(64 * 2**20, dtype=torch.uint8)))
        alive: list[int] = []

        def accept(_: Any) -> None:
            alive.append(len({tensor.data_ptr() for tensor in tensors_alive() if tensor.numel() >= 2**26}))

        with answering(sends(ok(len(content), content[:-1] + b"x"))) as one, serving() as server:
            server.publish(KEY, torch.zeros(64 * 2**20, dtype=torch.uint8))
            sources = {"a": lambda: one, "b": lambda: server.address}
            Fetch(sources, KEY, 20, accept=accept).run()
        assert alive == [2], "the source's own, and what has arrived"


def tensors_alive() -> Iterator[torch.Tensor]:
    return (found for found in gc.get_objects() if type(found) is torch.Tensor)


def hangs(connection: socket.socket) -> None:
    connection.recv(1)


class TestCancel:
    @pytest.mark.parametrize("script", [silent, hangs], ids=["that has begun", "that has not"])
    def test_ends_a_transfer_at_once(self, script: Script) -> None:
        with answering(script) as address, ThreadPoolExecutor(1) as pool, took(0.2, 30):
            fetch = from_first(address, silence_s=60)
            running = pool.submit(fetch.run)
            time.sleep(0.2)
            assert not running.done()
            fetch.cancel("the quorum was revoked")
            with pytest.raises(StateUnavailable, match="canceled: the quorum was revoked"):
                running.result(30)

    def test_and_no_other_source_is_asked(self) -> None:
        with answering(hangs) as address, serving(STATE) as server, ThreadPoolExecutor(1) as pool, took(0.2, 30):
            fetch = from_first(address, server.address, silence_s=60)
            running = pool.submit(fetch.run)
            time.sleep(0.2)
            assert not running.done()
            fetch.cancel("the quorum was revoked")
            with pytest.raises(StateUnavailable, match="canceled: the quorum was revoked"):
                running.result(30)

    def test_before_it_begins(self) -> None:
        with serving(STATE) as server:
            fetch = from_first(server.address)
            fetch.cancel("revoked")
            with pytest.raises(StateUnavailable, match="canceled: revoked"):
                fetch.run()
