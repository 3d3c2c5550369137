"""What goes to many at once, as bytes that are made once."""

import time

from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import JoinAccepted, ToManager
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.streams import SESSION_RESPONSES, accepted_for, accepted_shared
from lighthouse_runtime.net.outbox import Body
from lighthouse_runtime.server.stream_peer import Frames


class SessionFrames(Frames[ToManager]):
    """Sessions are told one quorum each under a number of its own: all but that number is made once."""

    def __init__(self) -> None:
        super().__init__(SESSION_RESPONSES.write)
        self._quorum: Quorum | None = None
        self._shared = b""

    def of(self, message: ToManager) -> Body:
        if not isinstance(message, JoinAccepted):
            return self.bytes_of(message)
        if message.quorum is not self._quorum:
            self._quorum = message.quorum
            self._shared = accepted_shared(message.quorum, message.stands, time.time(), message.secret)
        return self._shared, accepted_for(b"", message.join)


def native_quorums() -> Frames[Quorum]:
    """In the form of the documented service."""
    return Frames(lambda quorum: documented.quorum_to_native(quorum, time.time()))


def torchft_quorums() -> Frames[Quorum]:
    return Frames(lambda quorum: documented.quorum_to_torchft(quorum, time.time()))
