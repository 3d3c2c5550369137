"""A session of which many are open in one process: a quorum, the same bytes for all, is parsed once for all."""

from dataclasses import dataclass, replace

from lighthouse_protocol.messages.session import JoinAccepted, ToLighthouse, ToManager
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.wire.streams import SESSION_RESPONSES, accepted_for
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
from lighthouse_runtime.client.stream_kinds import SESSION, Session
from lighthouse_runtime.client.streams import StreamKind


class SharedReader:
    """What a lighthouse says; of a quorum that many are handed, the first one's bytes are parsed."""

    def __init__(self) -> None:
        self._shared = b""
        self._accepted: JoinAccepted | None = None

    def read(self, body: bytes) -> ToManager | None:
        if self._accepted is not None and body.startswith(self._shared):
            own = lighthouse_pb2.SessionResponse.FromString(body[len(self._shared) :])
            return replace(self._accepted, join=own.join_accepted.join)
        message = SESSION_RESPONSES.read(lighthouse_pb2.SessionResponse.FromString(body))
        if isinstance(message, JoinAccepted):
            self._accepted, self._shared = message, body[: -len(accepted_for(b"", message.join))]
        return message


@dataclass(frozen=True, slots=True)
class _SharedKind(StreamKind[ToLighthouse, ToManager]):
    reader: SharedReader

    def read(self, body: bytes) -> ToManager | None:
        return self.reader.read(body)


class SharingClient(AsyncLighthouseClient):
    def __init__(self, address: str, job: str, reader: SharedReader) -> None:
        super().__init__(address, job=job)
        self._kind = _SharedKind(SESSION.path, SESSION.requests, SESSION.responses, reader)

    def session(self, *, wait_for_ready: bool = False) -> Session:
        return self.open(self._kind, wait_for_ready)
