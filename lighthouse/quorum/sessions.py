"""The open sessions of a job; a message that goes to many is serialised once."""

from collections.abc import Iterator, Sequence

from lighthouse_protocol.messages.session import Goodbye, QuorumOrder, ToManager
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.wire.streams import SESSION_RESPONSES
from lighthouse_runtime.server.streams import Sender


class SessionTable:
    def __init__(self) -> None:
        self._senders: dict[int, Sender] = {}

    def __len__(self) -> int:
        return len(self._senders)

    def __iter__(self) -> Iterator[int]:
        return iter(self._senders)

    def add(self, session: int, sender: Sender) -> None:
        self._senders[session] = sender

    def remove(self, session: int) -> None:
        self._senders.pop(session, None)

    def send(self, session: int, message: ToManager) -> None:
        self.send_bytes(session, SESSION_RESPONSES.write(message).SerializeToString())

    def send_bytes(self, session: int, message: bytes) -> None:
        if (sender := self._senders.get(session)) is not None:
            sender.send(message)

    def order(self, order: QuorumOrder, sessions: Sequence[int]) -> None:
        message = SESSION_RESPONSES.write(order).SerializeToString()
        for session in sessions:
            self.send_bytes(session, message)

    def end(self, session: int, error: LighthouseError | None, reason: str = "") -> None:
        if (sender := self._senders.get(session)) is None:
            return
        if error is None:
            self.send(session, Goodbye(reason))
        sender.end(error)
