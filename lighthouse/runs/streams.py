"""The open streams of a run, by their numbers: those of its ranks and of its supervisors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lighthouse_protocol.messages.run import RankId, ToRunRank
from lighthouse_protocol.refusals import LighthouseError, Superseded
from lighthouse_runtime.ports import Peer

W = TypeVar("W")
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Stream(Generic[W, M]):
    who: W
    peer: Peer[M]


class Streams(dict[int, Stream[W, M]]):
    """`who` is told apart by what it has said of itself: a rank, or a supervisor's hello."""

    def who(self, session: int) -> W | None:
        """None: it was refused, or another one has taken its place."""
        stream = self.get(session)
        return None if stream is None else stream.who

    def send(self, session: int, message: M) -> None:
        if (stream := self.get(session)) is not None:
            stream.peer.send(message)

    def send_all(self, message: M) -> None:
        for stream in self.values():
            stream.peer.send(message)

    def refuse(self, session: int, refusal: M) -> None:
        """It is the last word."""
        if (stream := self.pop(session, None)) is not None:
            stream.peer.send(refusal)
            stream.peer.end()

    def close(self, error: LighthouseError) -> None:
        for stream in self.values():
            stream.peer.end(error)


class RankStreams:
    """A newer stream of the same process takes the place of its older one."""

    def __init__(self) -> None:
        self.open = Streams[RankId, ToRunRank]()
        self._newest: dict[RankId, int] = {}

    def add(self, session: int, rank: RankId, peer: Peer[ToRunRank]) -> None:
        older = self.open.pop(self._newest.get(rank, 0), None)
        if older is not None:
            older.peer.end(Superseded(f"{rank} has come by another stream; this one ends"))
        self.open[session] = Stream(rank, peer)
        self._newest[rank] = session

    def tell(self, ranks: Sequence[RankId], message: ToRunRank) -> None:
        for rank in ranks:
            self.open.send(self._newest.get(rank, 0), message)

    def refuse(self, rank: RankId, refusal: ToRunRank) -> None:
        self.open.refuse(self._newest.pop(rank, 0), refusal)

    def remove(self, session: int) -> None:
        stream = self.open.pop(session, None)
        if stream is not None and self._newest.get(stream.who) == session:
            del self._newest[stream.who]
