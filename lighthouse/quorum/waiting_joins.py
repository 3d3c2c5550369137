"""Joins that wait for a quorum: each by a call of its own, or by a session."""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import JoinAccepted, JoinRejected, ToManager
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.ports import Peer, Reply, Timer


@dataclass(frozen=True, slots=True)
class Answer:
    quorum: Quorum
    stands: bool


@dataclass(frozen=True, slots=True)
class SessionReply:
    """Join number `join` of a session. A lighthouse_runtime.ports.Reply."""

    peer: Peer[ToManager]
    join: int

    def answer(self, value: Answer) -> None:
        self.peer.send(JoinAccepted(self.join, value.quorum, value.stands))

    def refuse(self, error: LighthouseError) -> None:
        self.peer.send(JoinRejected(self.join, error))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`limit`: the end of its time."""

    reply: Reply[Answer]
    limit: Timer


class WaitingJoins:
    def __init__(self) -> None:
        self._calls: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: int, reply: Reply[Answer], limit: Timer) -> None:
        self._calls[call] = _Waiting(reply, limit)

    def drop(self, call: int | None) -> bool:
        """Whether it still waited. It gets no answer."""
        return self._take(call) is not None

    def answer(self, calls: Sequence[int], answer: Answer) -> None:
        for call in calls:
            if (reply := self._take(call)) is not None:
                reply.answer(answer)

    def refuse(self, call: int, error: LighthouseError) -> None:
        if (reply := self._take(call)) is not None:
            reply.refuse(error)

    def refuse_all(self, error: LighthouseError) -> None:
        for call in list(self._calls):
            self.refuse(call, error)

    def _take(self, call: int | None) -> Reply[Answer] | None:
        waiting = self._calls.pop(call, None) if call is not None else None
        if waiting is None:
            return None
        waiting.limit.cancel()
        return waiting.reply
