"""The open sessions of a job: one record each."""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse.quorum.waiting_joins import SessionReply
from lighthouse_protocol.messages.session import Goodbye, ToManager
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.ports import Peer


@dataclass(slots=True)
class Session:
    """`replica_id` is that of its hello. `join` and `reply`: the call by which it has asked for a quorum last, and
    where its answer goes."""

    peer: Peer[ToManager]
    replica_id: str
    join: int | None = None
    reply: SessionReply | None = None


class SessionTable(dict[int, Session]):
    """By number."""

    def send(self, number: int, message: ToManager) -> None:
        if (session := self.get(number)) is not None:
            session.peer.send(message)

    def send_all(self, numbers: Sequence[int], message: ToManager) -> None:
        for number in numbers:
            self.send(number, message)

    def end(self, number: int, error: LighthouseError | None, reason: str = "") -> None:
        if (session := self.get(number)) is None:
            return
        if error is None:
            session.peer.send(Goodbye(reason))
        session.peer.end(error)
