"""A stream as a driver sees it."""

from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.server.streams import Frames, StreamPeer


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
