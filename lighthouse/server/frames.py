"""What goes to many at once, as bytes that are made once."""

import time

from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import JoinAccepted, ToManager
from lighthouse_protocol.wire import documented, session_wire
from lighthouse_runtime.server.stream_peer import Frames


class SessionFrames(Frames[ToManager]):
    """Sessions are told one quorum each under a number of its own: all but that number is made once."""

    def __init__(self) -> None:
        super().__init__(session_wire.session_response_to_wire)
        self._quorum: Quorum | None = None
        self._shared = b""

    def of(self, message: ToManager) -> bytes:
        if not isinstance(message, JoinAccepted):
            return super().of(message)
        if message.quorum is not self._quorum:
            self._quorum = message.quorum
            self._shared = session_wire.handed_shared(message.quorum, message.stands, time.time())
        return session_wire.handed_for(self._shared, message.join)


class QuorumFrames:
    """The newest quorum in the form of the documented service, and in torchft's."""

    def __init__(self) -> None:
        self._quorum: Quorum | None = None
        self._forms: dict[str, bytes] = {}
        self._created_at = 0.0

    def native(self, quorum: Quorum) -> bytes:
        return self._of(quorum, "native")

    def torchft(self, quorum: Quorum) -> bytes:
        return self._of(quorum, "torchft")

    def _of(self, quorum: Quorum, form: str) -> bytes:
        if quorum is not self._quorum:
            self._quorum, self._forms, self._created_at = quorum, {}, time.time()
        if form not in self._forms:
            to_wire = documented.quorum_to_native if form == "native" else documented.quorum_to_torchft
            self._forms[form] = to_wire(quorum, self._created_at).SerializeToString()
        return self._forms[form]
