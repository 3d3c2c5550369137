"""Joins that wait for a quorum: each by a call of its own, or by a session."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import JoinAccepted, JoinRejected, ToManager
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.ports import Peer, Reply, Timer


@dataclass(frozen=True, slots=True)
class Answer:
    """`secret`: of the quorum's members, for those that have sessions."""

    quorum: Quorum
    stands: bool
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class SessionReply:
    """Join number `join` of a session. A lighthouse_runtime.ports.Reply."""

    peer: Peer[ToManager]
    join: int

    def answer(self, value: Answer) -> None:
        self.peer.send(JoinAccepted(self.join, value.quorum, value.stands, value.secret))

    def refuse(self, error: LighthouseError) -> None:
        self.peer.send(JoinRejected(self.join, error))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Since the moment `began_at`. `limit`: the end of its time."""

    reply: Reply[Answer]
    limit: Timer
    began_at: float


class WaitingJoins:
    """`waited` is called with the seconds that a join took to get its quorum, `refused` with why it got none."""

    def __init__(
        self,
        clock: Callable[[], float],
        waited: Callable[[float], None] = lambda seconds: None,
        refused: Callable[[LighthouseError], None] = lambda error: None,
    ) -> None:
        self._clock = clock
        self._waited = waited
        self._refused = refused
        self._calls: dict[int, _Waiting] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: int, reply: Reply[Answer], limit: Timer) -> None:
        self._calls[call] = _Waiting(reply, limit, self._clock())

    def drop(self, call: int | None) -> bool:
        """Whether it still waited. It gets no answer."""
        return self._take(call) is not None

    def answer(self, calls: Sequence[int], answer: Answer) -> None:
        for call in calls:
            if (waiting := self._take(call)) is not None:
                self._waited(self._clock() - waiting.began_at)
                waiting.reply.answer(answer)

    def refuse(self, call: int, error: LighthouseError) -> None:
        if (waiting := self._take(call)) is not None:
            self._refused(error)
            waiting.reply.refuse(error)

    def refuse_all(self, error: LighthouseError) -> None:
        for call in list(self._calls):
            self.refuse(call, error)

    def _take(self, call: int | None) -> _Waiting | None:
        waiting = self._calls.pop(call, None) if call is not None else None
        if waiting is not None:
            waiting.limit.cancel()
        return waiting
