"""The open streams of a run: those of its ranks and of its supervisors."""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.messages.run import HelloRejected, RankId, ToRunRank
from lighthouse_protocol.messages.supervisor import SupervisorHello, ToSupervisor
from lighthouse_protocol.refusals import LighthouseError, Superseded
from lighthouse_runtime.ports import Peer


@dataclass(frozen=True, slots=True)
class _RankStream:
    rank: RankId
    peer: Peer[ToRunRank]


class RankStreams:
    """A newer stream of the same process takes the place of its older one."""

    def __init__(self) -> None:
        self._streams: dict[int, _RankStream] = {}
        self._newest: dict[RankId, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, session: int, rank: RankId, peer: Peer[ToRunRank]) -> None:
        older = self._streams.pop(self._newest.get(rank, 0), None)
        if older is not None:
            older.peer.end(Superseded(f"{rank} has come by another stream; this one ends"))
        self._streams[session] = _RankStream(rank, peer)
        self._newest[rank] = session

    def rank_of(self, session: int) -> RankId | None:
        """None: another one has taken its place, or it was refused."""
        stream = self._streams.get(session)
        return None if stream is None else stream.rank

    def tell(self, ranks: Sequence[RankId], message: ToRunRank) -> None:
        for rank in ranks:
            if (stream := self._streams.get(self._newest.get(rank, 0))) is not None:
                stream.peer.send(message)

    def refuse(self, rank: RankId, refusal: HelloRejected) -> None:
        self.tell((rank,), refusal)
        session = self._newest.get(rank, 0)
        if (stream := self._streams.get(session)) is not None:
            stream.peer.end()
            self.remove(session)

    def remove(self, session: int) -> None:
        stream = self._streams.pop(session, None)
        if stream is not None and self._newest.get(stream.rank) == session:
            del self._newest[stream.rank]

    def close(self, error: LighthouseError) -> None:
        for stream in self._streams.values():
            stream.peer.end(error)


@dataclass(frozen=True, slots=True)
class _SupervisorStream:
    entry: SupervisorHello
    peer: Peer[ToSupervisor]


class SupervisorStreams:
    def __init__(self) -> None:
        self._streams: dict[int, _SupervisorStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, session: int, entry: SupervisorHello, peer: Peer[ToSupervisor]) -> None:
        self._streams[session] = _SupervisorStream(entry, peer)

    def entry_of(self, session: int) -> SupervisorHello | None:
        """None: it was refused."""
        stream = self._streams.get(session)
        return None if stream is None else stream.entry

    def tell(self, session: int, message: ToSupervisor) -> None:
        stream = self._streams.get(session)
        if stream is None:
            return
        stream.peer.send(message)
        if isinstance(message, HelloRejected):
            stream.peer.end()
            self.remove(session)

    def tell_all(self, message: ToSupervisor) -> None:
        for stream in self._streams.values():
            stream.peer.send(message)

    def remove(self, session: int) -> None:
        self._streams.pop(session, None)

    def close(self, error: LighthouseError) -> None:
        for stream in self._streams.values():
            stream.peer.end(error)
