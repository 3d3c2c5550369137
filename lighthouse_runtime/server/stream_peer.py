"""A stream as a driver sees it: messages, not bytes. What goes to many is serialised once."""

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.net.outbox import Body
from lighthouse_runtime.server.streams import Sender

M = TypeVar("M")


class Frames(Generic[M]):
    """The bytes of the messages of one kind of stream; those of the newest message are kept."""

    def __init__(self, to_wire: Callable[[M], Message]) -> None:
        self._to_wire = to_wire
        self._newest: M | None = None
        self._bytes = b""

    def of(self, message: M) -> Body:
        return self.bytes_of(message)

    def bytes_of(self, message: M) -> bytes:
        if message is not self._newest:
            self._newest, self._bytes = message, self._to_wire(message).SerializeToString()
        return self._bytes


class StreamPeer(Generic[M]):
    """A lighthouse_runtime.ports.Peer."""

    def __init__(self, sender: Sender, frames: Frames[M]) -> None:
        self._sender = sender
        self._frames = frames

    def send(self, message: M) -> None:
        self._sender.send(self._frames.of(message))

    def end(self, error: LighthouseError | None = None) -> None:
        self._sender.end(error)
