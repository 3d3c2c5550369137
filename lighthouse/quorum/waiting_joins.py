"""Joins that wait for a quorum: calls of one RPC, and joins by a session. Each message is serialised once."""

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse.quorum.sessions import SessionTable
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import JoinRejected
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.wire import documented, streams


class Answer:
    """A formed quorum in each form in which it is asked for."""

    def __init__(self, quorum: Quorum, stands: bool = False) -> None:
        self.quorum = quorum
        self._stands = stands
        self._created_at = time.time()

    @functools.cached_property
    def native(self) -> bytes:
        return documented.quorum_to_native(self.quorum, self._created_at).SerializeToString()

    @functools.cached_property
    def torchft(self) -> bytes:
        return documented.quorum_to_torchft(self.quorum, self._created_at).SerializeToString()

    def accepted(self, join: int) -> bytes:
        return streams.accepted_for(self._accepted, join)

    @functools.cached_property
    def _accepted(self) -> bytes:
        return streams.accepted_shared(self.quorum, self._stands, self._created_at)


@dataclass(slots=True)
class _SessionJoin:
    session: int
    join: int
    limit: asyncio.TimerHandle


class WaitingJoins:
    """A call is a future of a unary RPC, or a join by a session."""

    def __init__(self, sessions: "SessionTable") -> None:
        self._sessions = sessions
        self._futures: dict[int, asyncio.Future[Answer]] = {}
        self._joins: dict[int, _SessionJoin] = {}
        self._of_session: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def wait(self, call: int) -> "asyncio.Future[Answer]":
        future = self._futures[call] = asyncio.get_running_loop().create_future()
        return future

    def add_join(self, call: int, session: int, join: int, limit: asyncio.TimerHandle) -> None:
        """A newer join of a session takes the place of its older one."""
        if (older := self._of_session.get(session)) is not None:
            self.drop(older)
        self._joins[call] = _SessionJoin(session, join, limit)
        self._of_session[session] = call

    def drop(self, call: int) -> bool:
        """Whether it still waited."""
        return self._futures.pop(call, None) is not None or self._pop_join(call) is not None

    def drop_session(self, session: int, join: int | None = None) -> int | None:
        """The call of the session's join that still waited, or of `join` alone."""
        call = self._of_session.get(session)
        if call is None or (join is not None and self._joins[call].join != join):
            return None
        self._pop_join(call)
        return call

    def _pop_join(self, call: int) -> "_SessionJoin | None":
        join = self._joins.pop(call, None)
        if join is not None:
            join.limit.cancel()
            del self._of_session[join.session]
        return join

    def answer(self, calls: Sequence[int], answer: Answer) -> None:
        for call in calls:
            if (by := self._pop_join(call)) is not None:
                self._sessions.send_bytes(by.session, answer.accepted(by.join))
            elif (future := self._futures.pop(call, None)) is not None and not future.done():
                future.set_result(answer)

    def refuse(self, call: int, error: LighthouseError) -> None:
        if (by := self._pop_join(call)) is not None:
            self._sessions.send(by.session, JoinRejected(by.join, error))
        elif (future := self._futures.pop(call, None)) is not None and not future.done():
            future.set_exception(error)

    def refuse_all(self, error: LighthouseError) -> None:
        for call in [*self._futures, *self._joins]:
            self.refuse(call, error)
