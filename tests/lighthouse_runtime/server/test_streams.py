"""Streams of the server: the gate that holds messages back, and the peer that a driver sees."""

import asyncio
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from lighthouse_protocol.refusals import LighthouseError, NotLeader, Unreachable
from lighthouse_runtime.server.streams import Frames, OutputGate, StreamPeer

DEPOSED = NotLeader("deposed", leader="b:1")


class Said:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.refusal: LighthouseError | None = None
        self.gate = OutputGate(lambda: self.refusal)

    def say(self, word: str) -> None:
        self.gate.deliver(lambda: self.words.append(word))


def test_what_follows_a_record_waits_for_it_and_keeps_its_order() -> None:
    said = Said()
    said.say("before")
    first = said.gate.hold()
    said.say("a")
    second = said.gate.hold()
    said.say("b")
    assert said.words == ["before"]
    second()
    assert said.words == ["before"], "the first record is not durable yet"
    first()
    assert said.words == ["before", "a", "b"]
    said.say("c")
    assert said.words == ["before", "a", "b", "c"]


def test_what_is_dropped_is_never_said() -> None:
    said = Said()
    release = said.gate.hold()
    said.say("a")
    said.gate.drop(DEPOSED)
    release()
    said.say("b")
    assert said.words == ["b"]


def test_a_server_that_may_not_speak_says_nothing_not_even_what_became_durable() -> None:
    said = Said()
    release = said.gate.hold()
    said.say("a")
    said.refusal = DEPOSED
    release()
    said.say("b")
    assert said.words == []
    with pytest.raises(NotLeader, match="deposed"):
        said.gate.check()


async def test_a_call_waits_for_what_is_held_when_it_asks() -> None:
    said = Said()
    await said.gate.wait_delivered()
    release = said.gate.hold()
    call = asyncio.create_task(said.gate.wait_delivered())
    await asyncio.sleep(0)
    assert not call.done()
    release()
    await call


async def test_a_call_that_waits_ends_with_the_reason_when_all_is_dropped() -> None:
    said = Said()
    said.gate.hold()
    call = asyncio.create_task(said.gate.wait_delivered())
    await asyncio.sleep(0)
    said.gate.drop(DEPOSED)
    with pytest.raises(NotLeader) as caught:
        await call
    assert caught.value.leader == "b:1"


async def test_a_call_whose_answer_may_not_leave_any_more_is_refused() -> None:
    said = Said()
    said.refusal = DEPOSED
    with pytest.raises(NotLeader):
        await said.gate.wait_delivered()


class Recorder:
    """A `Sender`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ends: list[object] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def end(self, error: object = None) -> None:
        self.ends.append(error)


def peers(count: int) -> tuple[list[Recorder], list[StreamPeer[str]], list[str]]:
    written: list[str] = []

    def to_wire(text: str) -> StringValue:
        written.append(text)
        return StringValue(value=text)

    senders, frames = [Recorder() for _ in range(count)], Frames(to_wire)
    made: list[Any] = [StreamPeer(sender, frames) for sender in senders]  # pyright: ignore[reportArgumentType]
    return senders, made, written


def test_what_goes_to_many_is_serialised_once() -> None:
    senders, some, written = peers(3)
    message = "".join(["a", "b"])
    for peer in some:
        peer.send(message)
    assert written == ["ab"]
    assert {bytes(sender.sent[0]) for sender in senders} == {StringValue(value="ab").SerializeToString()}
    assert senders[0].sent[0] is senders[2].sent[0]


def test_another_message_is_another_frame() -> None:
    senders, some, _ = peers(1)
    for text in ("a", "b", "a"):
        some[0].send(text)
    assert [StringValue.FromString(raw).value for raw in senders[0].sent] == ["a", "b", "a"]


def test_an_end_keeps_its_error() -> None:
    senders, some, _ = peers(1)
    error = Unreachable("it stops")
    some[0].end(error)
    some[0].end()
    assert senders[0].ends == [error, None]
