"""State over process groups: the same state, or a clear failure in bounded time; one target harms no other."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from agent_client.state.codec import Encoding, encode
from agent_client.state.tree import CorruptState
from agent_client.transfer import gloo_transport
from agent_client.transfer.gloo_transport import MESSAGE_BYTES, GroupTransport, messages
from lighthouse_protocol.messages.membership import Assignment
from tests.agent_client.assignments import assignment
from tests.agent_client.state.trees import same
from tests.agent_client.transfer.sources import took

HOST = "127.0.0.1"
STATE = {"w": torch.arange(3 * 2**19 + 5, dtype=torch.int64), "step": 12, "raw": b"abc", "t": torch.ones(7, 5).t()}


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def source(store: TCPStore, request: pytest.FixtureRequest) -> Assignment:
    """Of replica 0, from which 1 and 2 heal; a quorum of its own for each test."""
    quorum_id = abs(hash(request.node.name)) % 10**9 + 1
    return assignment(0, 3, quorum_id=quorum_id, store_address=f"{HOST}:{store.port}", serve_to=(1, 2))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as it:
        yield it


def transport(silence_s: float = 10.0) -> GroupTransport:
    """As in an Agent, it outlives its transfers."""
    alive.append(GroupTransport(0, HOST, silence_s))
    return alive[-1]


alive: list[GroupTransport] = []


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    while alive:
        alive.pop().cancel(0)


def target(source: Assignment, replica_rank: int) -> Assignment:
    return replace(source, replica_rank=replica_rank, serve_to=(), heal_from_rank=0)


@pytest.mark.parametrize("length", [0, 1, MESSAGE_BYTES // 2, 3 * MESSAGE_BYTES])
def test_messages_are_the_encoding_in_equal_parts(length: int) -> None:
    encoding = encode(torch.arange(length, dtype=torch.uint8))
    first, *others = [message.clone() for message in messages(encoding)]
    assert first.tolist() == [encoding.length]
    assert b"".join(message.numpy().tobytes() for message in others) == b"".join(encoding)
    assert all(len(message) == MESSAGE_BYTES for message in others[:-1])


def test_all_targets_get_the_state(source: Assignment, pool: ThreadPoolExecutor) -> None:
    received = [pool.submit(transport().receive, target(source, rank), max_bytes=2**40) for rank in (1, 2)]
    transport().send(source, encode(STATE))
    for each in received:
        assert same(each.result(60), STATE)


def test_a_target_that_does_not_come_keeps_the_other_from_nothing(source: Assignment, pool: ThreadPoolExecutor) -> None:
    received = pool.submit(transport().receive, target(source, 2), max_bytes=2**40)
    transport(silence_s=1.0).send(source, encode(STATE))
    assert same(received.result(60)["w"], STATE["w"])


class Wire:
    """From a source whose messages a test replaces, to one of its targets."""

    def __init__(self, source: Assignment, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = replace(source, serve_to=(1,))
        self._pool, self._monkeypatch = pool, monkeypatch

    def receive(self, send: Callable[[Encoding], Iterator[torch.Tensor]], silence_s: float = 10.0) -> Any:
        self._monkeypatch.setattr(gloo_transport, "messages", send)
        received = self._pool.submit(transport(silence_s).receive, target(self.source, 1), max_bytes=2**40)
        transport().send(self.source, encode(STATE))
        return received.result(60)


@pytest.fixture
def wire(source: Assignment, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(source, pool, monkeypatch)


def test_a_target_that_breaks_off_keeps_the_other_from_nothing(
    source: Assignment, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking, staying = transport(), transport()

    def messages_then_break(encoding: Encoding) -> Iterator[torch.Tensor]:
        for number, message in enumerate(messages(encoding)):
            if number == 2:
                breaking.cancel(source.quorum_id)
            yield message

    monkeypatch.setattr(gloo_transport, "messages", messages_then_break)
    broken = pool.submit(breaking.receive, target(source, 1), max_bytes=2**40)
    received = pool.submit(staying.receive, target(source, 2), max_bytes=2**40)
    transport().send(source, encode(STATE))
    with pytest.raises(RuntimeError):
        broken.result(60)
    assert same(received.result(60)["w"], STATE["w"])


def test_a_source_that_does_not_come(source: Assignment) -> None:
    with took(0.4, 10), pytest.raises(RuntimeError):
        transport(silence_s=0.5).receive(target(source, 1), max_bytes=2**40)


def test_a_source_that_ends_in_the_middle(wire: Wire) -> None:
    with took(0, 10), pytest.raises(RuntimeError):  # at once, or after silence_s where gloo misses the end
        wire.receive(lambda encoding: islice(messages(encoding), 2), silence_s=3.0)


@pytest.mark.parametrize(
    ("first", "rest", "words"),
    [
        ([100], bytes(100), "not a state"),
        ([-5], b"", "a state of -5 bytes"),
        ([2**39], bytes(MESSAGE_BYTES), "not a state"),
        ([2**60], b"", "a state of 1152921504606846976 bytes was announced, and there is room for 1099511627776"),
    ],
)
def test_garbage_is_refused(wire: Wire, first: list[int], rest: bytes, words: str) -> None:
    parts = [torch.tensor(first), *([torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [])]
    with pytest.raises(CorruptState, match=words):
        wire.receive(lambda _: iter(parts))


def test_damage_is_found(wire: Wire) -> None:
    def damaged(encoding: Encoding) -> Iterator[torch.Tensor]:
        for number, message in enumerate(messages(encoding)):
            if number == 2:
                message[77] ^= 1
            yield message

    with pytest.raises(CorruptState, match="checksum of tensor 0"):
        wire.receive(damaged)


def test_a_cancel_ends_what_waits(
    source: Assignment, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving, may_go_on = transport(silence_s=60.0), threading.Event()

    def stall(encoding: Encoding) -> Iterator[torch.Tensor]:
        yield torch.tensor([encoding.length])
        may_go_on.wait(60)

    monkeypatch.setattr(gloo_transport, "messages", stall)
    received = pool.submit(receiving.receive, target(source, 1), max_bytes=2**40)
    sent = pool.submit(transport().send, replace(source, serve_to=(1,)), encode(STATE))
    time.sleep(0.5)
    assert not received.done()
    with took(0, 20):
        receiving.cancel(source.quorum_id)
        with pytest.raises(RuntimeError):
            received.result(60)
    may_go_on.set()
    sent.result(60)


def test_what_was_cancelled_before_it_begins_does_not(source: Assignment, pool: ThreadPoolExecutor) -> None:
    receiving = transport()
    receiving.cancel(source.quorum_id)
    sent = pool.submit(transport().send, replace(source, serve_to=(1,)), encode(STATE))
    with pytest.raises(RuntimeError, match="revoked"):
        receiving.receive(target(source, 1), max_bytes=2**40)
    sent.result(60)
