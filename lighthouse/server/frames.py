"""What goes to many at once, as bytes that are made once."""

import time

from lighthouse_protocol.messages.membership import Quorum, QuorumChange
from lighthouse_protocol.messages.session import JoinAccepted, QuorumChanged, ToManager
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.streams import (
    SESSION_RESPONSES,
    accepted_for,
    accepted_shared,
    changed_for,
    changed_shared,
)
from lighthouse_runtime.net.outbox import Body
from lighthouse_runtime.server.stream_peer import Frames


class SessionFrames(Frames[ToManager]):
    """Sessions are told one quorum each, or one change, under a number of their own: all but that is made once."""

    def __init__(self) -> None:
        super().__init__(SESSION_RESPONSES.write)
        self._quorum: Quorum | None = None
        self._shared = b""
        self._change: QuorumChange | None = None
        self._shared_change = b""

    def of(self, message: ToManager) -> Body:
        if isinstance(message, QuorumChanged):
            if message.change is not self._change:
                self._change, self._shared_change = message.change, changed_shared(message)
            return self._shared_change, changed_for(message.join)
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
