"""Joins that wait for a quorum: each by a call of its own, or by a session."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lighthouse_protocol.messages.membership import Quorum, QuorumChange
from lighthouse_protocol.messages.session import JoinAccepted, JoinRejected, QuorumChanged, ToManager
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.quorum_change import NamedQuorum, change_between
from lighthouse_runtime.ports import Peer, Reply, Timer


class Handout:
    """A quorum as it is handed out, and what has changed since the one before, which most managers hold. Of that, and
    of its digest, nothing is reckoned before somebody needs it, and all of it once."""

    def __init__(self, quorum: Quorum, before: "Handout | None" = None) -> None:
        self._quorum = quorum
        self._before = before
        if before is not None:
            before._before = None

    def change_for(self, held: str) -> QuorumChange | None:
        """For a manager that holds the quorum of that digest; None: it needs the whole list."""
        if not held or self._before is None or held != self._before._named.digest:
            return None
        return self._change

    @cached_property
    def _named(self) -> NamedQuorum:
        return NamedQuorum.of(self._quorum)

    @cached_property
    def _change(self) -> QuorumChange | None:
        return change_between(self._before._quorum, self._named) if self._before is not None else None


@dataclass(frozen=True, slots=True)
class Answer:
    """`secret`: of the quorum's members, for those that have sessions. `handout`: None for a quorum that is told whole
    to whoever asks."""

    quorum: Quorum
    stands: bool
    secret: str = field(default="", repr=False)
    handout: Handout | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SessionReply:
    """Join number `join` of a session, and the digest of the quorum that its manager holds. A
    lighthouse_runtime.ports.Reply."""

    peer: Peer[ToManager]
    join: int
    holds: str = field(default="", compare=False)

    def answer(self, value: Answer) -> None:
        change = value.handout.change_for(self.holds) if value.handout is not None else None
        if change is None:
            self.peer.send(JoinAccepted(self.join, value.quorum, value.stands, value.secret))
        else:
            self.peer.send(QuorumChanged(self.join, change, value.stands, value.secret))

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
