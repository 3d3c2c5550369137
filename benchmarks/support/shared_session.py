"""A session of which many are open in one process: what is the same for all is parsed, and reckoned, once for all."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lighthouse_protocol.messages.session import GroupReport, JoinAccepted, QuorumChanged, ToLighthouse, ToManager
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.rules.quorum_change import NamedQuorum
from lighthouse_protocol.wire.streams import SESSION_RESPONSES, accepted_for, changed_for
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
from lighthouse_runtime.client.stream_kinds import SESSION, Session
from lighthouse_runtime.client.streams import StreamKind
from manager.group.rules.lighthouse_session import SessionMachine

Answer = JoinAccepted | QuorumChanged


class SharedReader:
    """What a lighthouse says; of a quorum that many are handed, the first one's bytes are parsed."""

    def __init__(self) -> None:
        self.carried = 0  # bytes of messages, both ways
        self._answers: dict[type[Answer], tuple[bytes, Answer]] = {}  # the last one of each kind

    def read(self, body: bytes) -> ToManager | None:
        self.carried += len(body)
        for shared, answer in self._answers.values():
            if body.startswith(shared):
                own = lighthouse_pb2.SessionResponse.FromString(body[len(shared) :])
                kind = own.WhichOneof("message")
                return replace(answer, join=getattr(own, kind).join) if kind else None
        message = SESSION_RESPONSES.read(lighthouse_pb2.SessionResponse.FromString(body))
        if isinstance(message, JoinAccepted | QuorumChanged):
            is_whole = isinstance(message, JoinAccepted)
            own = accepted_for(b"", message.join) if is_whole else changed_for(message.join)
            self._answers[type(message)] = body[: -len(own)], message
        return message


class SharedQuorums:
    """What the last one that was told a list, or a change, knew then, by what names that."""

    def __init__(self) -> None:
        self.known: dict[type[Answer], tuple[object, NamedQuorum | None]] = {}


class SharingSession(SessionMachine):
    """Many are told the same, on top of the same."""

    def __init__(self, report: Callable[[], GroupReport], secret: str, shared: SharedQuorums) -> None:
        super().__init__(report, secret=secret)
        self._shared = shared

    def whole(self, told: JoinAccepted | QuorumChanged) -> JoinAccepted | None:
        kind = type(told)
        what = id(told.quorum) if isinstance(told, JoinAccepted) else (self.digest, told.change.digest)
        if kind not in self._shared.known or self._shared.known[kind][0] != what:
            whole = super().whole(told)
            self._shared.known[kind] = what, self.known
            return whole
        self.known = self._shared.known[kind][1]
        if self.known is None:
            return None
        return JoinAccepted(told.join, self.known.quorum, told.stands, told.secret)

    @property
    def digest(self) -> str:
        return self.known.digest if self.known is not None else ""


@dataclass(frozen=True, slots=True)
class _SharedKind(StreamKind[ToLighthouse, ToManager]):
    reader: SharedReader

    def write(self, message: ToLighthouse) -> bytes:
        body = self.requests.write(message).SerializeToString()
        self.reader.carried += len(body)
        return body

    def read(self, body: bytes) -> ToManager | None:
        return self.reader.read(body)


class SharingClient(AsyncLighthouseClient):
    def __init__(self, address: str, job: str, reader: SharedReader) -> None:
        super().__init__(address, job=job)
        self._kind = _SharedKind(SESSION.path, SESSION.requests, SESSION.responses, reader)

    def session(self, *, wait_for_ready: bool = False) -> Session:
        return self.open(self._kind, wait_for_ready)
