"""A transfer that breaks goes on with the piece where it broke; a failing source gives way to the next."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from agent_client.healing import fetch
from agent_client.healing.connection import StateUnavailable
from agent_client.healing.fetch import Fetch
from agent_client.healing.rules.stripes import TRIES
from agent_client.state.codec import CHECKSUM_BYTES, PIECE_BYTES, Encoding, encode
from agent_client.state.snapshot import StateMismatch, install_matches
from tests.agent_client.healing.sources import KEY, Script, answering, ok, sends, serving, took
from tests.agent_client.state.trees import same
from tests.processes import eventually

pytestmark = pytest.mark.usefixtures("no_threads_left")
STATE = {"w": torch.arange(2**20, dtype=torch.int64), "step": 12}
OTHER_MODEL = {"w": torch.zeros(3), "step": 12}


def manifest_of(state: Any) -> bytes:
    content = encode(state).head + b"".join(encode(state).checksums())
    return ok(len(content), content)


MANIFEST = manifest_of(STATE)
BODY = b"".join(encode(STATE).stripe(0, encode(STATE).body_length))


def from_first(*addresses: str, timeout_s: float = 60.0, expected: Any = STATE, **options: Any) -> Fetch:
    sources = {address: lambda address=address: address for address in addresses}
    return Fetch(sources, KEY, timeout_s, accept=lambda state: install_matches(expected, state), **options)


class TestBrokenConnection:
    def test_goes_on_at_the_piece_where_it_broke(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts, began_at = [PIECE_BYTES + 1_000_000, 1_000_000], []

        def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
            began_at.append(start)
            left = cuts.pop(0) if cuts else stop
            for chunk in real(encoding, start, stop):
                yield chunk[:left]
                left -= len(chunk)
                if left < 0:
                    raise ConnectionResetError("cut by the test")

        monkeypatch.setattr(Encoding, "stripe", stripe)
        with serving(STATE) as server:
            assert same(from_first(server.address).run(), STATE)
        assert began_at == [0, PIECE_BYTES + CHECKSUM_BYTES, PIECE_BYTES + CHECKSUM_BYTES]

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
    connection.sendall(MANIFEST[:100])
    connection.recv(1)


manifest = sends(MANIFEST)
damaged = sends(ok(len(BODY), BODY[:-1] + b"x"))
refusing = sends(b"HTTP/1.0 409 Conflict\r\n\r\nno")
misfit = sends(manifest_of(OTHER_MODEL))

BAD: dict[str, tuple[Script, ...]] = {
    "damaged": (manifest, damaged),
    "garbage": (sends(bytes(range(256)) * 20),),
    "garbage in its pieces": (manifest, sends(bytes(range(256)) * 20)),
    "oversized": (sends(ok(2**50, BODY)),),
    "oversized in its pieces": (manifest, sends(ok(2**50, BODY))),
    "truncated": (manifest, sends(ok(len(BODY), BODY[: len(BODY) // 2]))),
    "refusing": (refusing,),
    "misfit": (misfit,),
    "silent": (silent,),
    "silent in its pieces": (manifest, silent),
}


class TestAnotherSource:
    @pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
    def test_is_tried(self, bad: tuple[Script, ...]) -> None:
        with answering(*bad) as address, serving(STATE) as server, took(0, 30):
            assert same(from_first(address, server.address, silence_s=1.0).run(), STATE)

    def test_each_is_named_when_all_fail(self) -> None:
        with answering(manifest, damaged) as one, answering(refusing) as two:
            with pytest.raises(StateUnavailable) as caught:
                from_first(one, two, "http://127.0.0.1:1").run()
        for words in (
            f"from {one} cannot be used",
            f"from {two} is not available: it answered 409",
            "127.0.0.1:1 is not available, no checkpoint server answers",
        ):
            assert words in str(caught.value)

    def test_one_kind_of_failure_keeps_its_class(self) -> None:
        with serving(OTHER_MODEL) as one, serving(OTHER_MODEL) as two:
            with pytest.raises(StateMismatch, match=r"\['w'\]: shape"):
                from_first(one.address, two.address).run()

    def test_what_finds_the_address_may_fail(self) -> None:
        def fail() -> str:
            raise ConnectionError("the manager is gone")

        with serving(STATE) as server:
            sources = {"a": fail, "b": lambda: server.address}
            assert same(Fetch(sources, KEY, 20, accept=lambda _: None).run(), STATE)

    def test_what_a_bad_source_has_sent_is_let_go(self) -> None:
        """Or else healing takes the memory of two states."""
        alive: list[int] = []

        def accept(state: Any) -> None:
            alive.append(len({tensor.data_ptr() for tensor in tensors_alive() if tensor.numel() >= 2**26}))
            if state["bad"]:
                raise StateMismatch("it is bad")

        with serving() as one, serving() as two:
            one.publish(KEY, {"w": torch.ones(2**26, dtype=torch.uint8), "bad": True, "more": torch.zeros(1)})
            two.publish(KEY, {"w": torch.zeros(2**26, dtype=torch.uint8), "bad": False})
            sources = {"a": lambda: one.address, "b": lambda: two.address}
            Fetch(sources, KEY, 60, accept=accept).run()
        assert alive == [3, 3], "those of the sources, and what has arrived"


def tensors_alive() -> Iterator[torch.Tensor]:
    return (found for found in gc.get_objects() if type(found) is torch.Tensor and not found.is_meta)


def hangs(connection: socket.socket) -> None:
    connection.recv(1)


class TestCancel:
    @pytest.mark.parametrize("script", [silent, hangs], ids=["that has begun", "that has not"])
    def test_ends_a_transfer_at_once_and_no_other_source_is_asked(self, script: Script) -> None:
        with answering(script) as address, serving(STATE) as server, ThreadPoolExecutor(1) as pool, took(0.2, 30):
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


def test_a_cancel_between_two_pieces_ends_the_reader_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[threading.ExceptHookArgs] = []
    checks: list[int] = []

    def check(transfer: Any, source: str, piece: int, real: Any = fetch._Transfer._awaited_place) -> Any:
        found = real(transfer, source, piece)
        checks.append(piece)
        if len(checks) == 2:
            transfer._requests.cancel("the quorum was revoked")
            eventually(lambda: not transfer.tensors, "the transfer has ended")
        return found

    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(fetch._Transfer, "_awaited_place", check)
    with serving(STATE) as server, pytest.raises(StateUnavailable, match="the quorum was revoked"):
        from_first(server.address).run()
    readers = lambda: [thread for thread in threading.enumerate() if thread.name == "lighthouse stripe"]  # noqa: E731
    assert eventually(lambda: not readers())
    assert [(each.exc_type, each.exc_value) for each in errors] == []
