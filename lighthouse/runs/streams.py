"""Whom a run's driver tells: streams of ranks and of supervisors; what is the same for many is serialised once."""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.messages.run import RankId, Refusal, ToWorker
from lighthouse_protocol.messages.supervisor import SupervisorEntry, ToSupervisor
from lighthouse_protocol.refusals import LighthouseError, Superseded
from lighthouse_protocol.wire.generation_wire import rank_response_to_wire
from lighthouse_protocol.wire.supervisor_wire import supervisor_response_to_wire
from lighthouse_runtime.server.streams import Sender


@dataclass(frozen=True, slots=True)
class _RankStream:
    rank: RankId
    sender: Sender


class Ranks:
    """A newer stream of the same process takes the place of its older one."""

    def __init__(self) -> None:
        self._streams: dict[int, _RankStream] = {}
        self._newest: dict[RankId, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, session: int, rank: RankId, sender: Sender) -> None:
        older = self._streams.pop(self._newest.get(rank, 0), None)
        if older is not None:
            older.sender.end(Superseded(f"{rank} has come by another stream; this one ends"))
        self._streams[session] = _RankStream(rank, sender)
        self._newest[rank] = session

    def rank_of(self, session: int) -> RankId | None:
        """None: another one has taken its place, or it was refused."""
        stream = self._streams.get(session)
        return None if stream is None else stream.rank

    def tell(self, ranks: Sequence[RankId], message: ToWorker) -> None:
        if not ranks:
            return
        body = rank_response_to_wire(message).SerializeToString()
        for rank in ranks:
            if (stream := self._streams.get(self._newest.get(rank, 0))) is not None:
                stream.sender.send(body)

    def refuse(self, rank: RankId, refusal: Refusal) -> None:
        self.tell((rank,), refusal)
        session = self._newest.get(rank, 0)
        if (stream := self._streams.get(session)) is not None:
            stream.sender.end()
            self.remove(session)

    def remove(self, session: int) -> None:
        stream = self._streams.pop(session, None)
        if stream is not None and self._newest.get(stream.rank) == session:
            del self._newest[stream.rank]

    def close(self, error: LighthouseError) -> None:
        for stream in self._streams.values():
            stream.sender.end(error)


@dataclass(frozen=True, slots=True)
class _SupervisorStream:
    entry: SupervisorEntry
    sender: Sender


class Supervisors:
    def __init__(self) -> None:
        self._streams: dict[int, _SupervisorStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, session: int, entry: SupervisorEntry, sender: Sender) -> None:
        self._streams[session] = _SupervisorStream(entry, sender)

    def entry_of(self, session: int) -> SupervisorEntry | None:
        """None: it was refused."""
        stream = self._streams.get(session)
        return None if stream is None else stream.entry

    def tell(self, session: int, message: ToSupervisor) -> None:
        stream = self._streams.get(session)
        if stream is None:
            return
        stream.sender.send(supervisor_response_to_wire(message))
        if isinstance(message, Refusal):
            stream.sender.end()
            self.remove(session)

    def tell_all(self, message: ToSupervisor) -> None:
        body = supervisor_response_to_wire(message).SerializeToString()
        for stream in self._streams.values():
            stream.sender.send(body)

    def remove(self, session: int) -> None:
        self._streams.pop(session, None)

    def close(self, error: LighthouseError) -> None:
        for stream in self._streams.values():
            stream.sender.end(error)
