"""Sessions of many managers in one process. Content that is equal for all is parsed and computed only once."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.support.light_stream import LightCall, Turns, open_light
from lighthouse_protocol.messages.membership import Assignment, Quorum
from lighthouse_protocol.messages.session import JoinAccepted, QuorumChanged, ToLighthouse, ToManager
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.rules.quorum_change import NamedQuorum
from lighthouse_protocol.wire.streams import SESSION_RESPONSES, accepted_for, changed_for
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.client.connection import OPENED_WITHIN_S
from lighthouse_runtime.client.streams import SESSION, AsyncStream, Session, StreamKind
from lighthouse_runtime.security.client_tls import fetch_tls, known_tls
from manager.group.records import ReplicaGroup, StandingQuorum
from manager.group.requests import QuorumRequests
from manager.group.session import SessionMachine

Answer = JoinAccepted | QuorumChanged


class SharedReader:
    """Parses messages of a lighthouse. If many managers receive the same quorum, it is parsed once."""

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
    """Cache of results for the last quorum, shared by many sessions."""

    def __init__(self) -> None:
        # By kind of message: the identity of the last content, and the quorum that it has led to.
        self.known: dict[type[Answer], tuple[object, NamedQuorum | None]] = {}
        self.assigned: dict[tuple[int, int, bool], Assignment] = {}
        self.for_one_step: dict[tuple[int, bool], bool] = {}


class SharingSession(SessionMachine):
    """A session that reuses the result of another session for the same message and quorum."""

    def __init__(self, secret: str, shared: SharedQuorums) -> None:
        super().__init__(secret=secret)
        self._shared = shared

    def full_answer(self, answer: JoinAccepted | QuorumChanged) -> JoinAccepted | None:
        kind = type(answer)
        what = id(answer.quorum) if isinstance(answer, JoinAccepted) else (self.digest, answer.change.digest)
        if kind not in self._shared.known or self._shared.known[kind][0] != what:
            whole = super().full_answer(answer)
            self._shared.known[kind] = what, self.known
            return whole
        self.known = self._shared.known[kind][1]
        if self.known is None:
            return None
        return JoinAccepted(answer.join, self.known.quorum, answer.stands, answer.secret)

    @property
    def digest(self) -> str:
        return self.known.digest if self.known is not None else ""


class SharingRequests(QuorumRequests):
    """Grants that share one assignment per quorum, since managers without ranks all use it in the same way."""

    def __init__(self, group: ReplicaGroup, shared: SharedQuorums) -> None:
        super().__init__(group)
        self._shared = shared

    def _assign(self, standing: StandingQuorum, group_rank: int, init_sync: bool) -> Assignment:
        what = (standing.quorum.quorum_id, group_rank, init_sync)
        if what not in self._shared.assigned:
            self._shared.assigned = {what: super()._assign(standing, group_rank, init_sync)}
        return self._shared.assigned[what]

    def _is_for_one_step(self, quorum: Quorum, init_sync: bool) -> bool:
        what = (quorum.quorum_id, init_sync)
        if what not in self._shared.for_one_step:
            self._shared.for_one_step = {what: super()._is_for_one_step(quorum, init_sync)}
        return self._shared.for_one_step[what]


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
    """A client with sessions over light streams and no other calls. It connects from the local address `source`."""

    def __init__(self, address: str, job: str, reader: SharedReader, turns: Turns, source: str) -> None:
        super().__init__(address, job=job)
        self._turns = turns
        self._source = source
        self._kind = _SharedKind(SESSION.path, SESSION.requests, SESSION.responses, reader)
        self._call: LightCall | None = None

    @property
    def is_connected(self) -> bool:
        return self._call is not None and not self._call.done()

    def session(self, *, wait_for_ready: bool = False) -> Session:
        return AsyncStream(self._open_light(), self.address, self._kind, self._map_error)

    async def _open_light(self) -> Any:
        tls = None
        if self._coordinator.has_tls:
            tls = known_tls(self._coordinator)
            tls = tls or await asyncio.to_thread(fetch_tls, self._coordinator, OPENED_WITHIN_S, waits=False)
        told = self._coordinator, tls, self._kind.path, self._metadata
        self._call = await open_light(*told, self._turns, source=self._source, timeout_s=OPENED_WITHIN_S)
        return self._call
