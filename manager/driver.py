"""The loop's side of gather and commit: feed an event, perform the effects. A waiting RPC is a future."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manager import commit, gather
from manager.lighthouse_link import LighthouseLink
from protos import torchft_pb2
from protos.membership import Assignment, Participant, Quorum
from protos.refusals import DeadlinePassed, LighthouseError, Unreachable

log = logging.getLogger(__name__)


class ManagerDriver:
    """`me` is this group's participant but for what changes from round to round; `life` names the manager's start."""

    def __init__(self, me: Participant, life: str, link: LighthouseLink) -> None:
        self.gather = gather.GatherMachine(me.wire_id, me.group_world_size)
        self.commit = commit.CommitMachine(me.group_world_size)
        self._me = me
        self._life = life
        self._link = link
        self._link.incarnation = self.incarnation
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._join: asyncio.Task[None] | None = None
        self._closed: LighthouseError | None = None

    @property
    def incarnation(self) -> str:
        return f"{self._life}.{self.gather.incarnation}"

    def describe(self, me: Participant) -> None:
        """The addresses, once they are known."""
        self._me = me

    @property
    def phase(self) -> str:
        if self.gather.is_joined:
            return "joined"
        if self.gather.waiting:
            return "gathering"
        return "voting" if self.commit.is_voting else "idle"

    async def ask(self, time_left_s: float, **fields: Any) -> tuple[Assignment, Quorum]:
        """One rank's request (the fields of gather.Ask). Raises a refusal, at the latest when its time is over."""
        deadline_at = asyncio.get_running_loop().time() + time_left_s

        def event(call: int) -> gather.Ask:
            return gather.Ask(call=call, deadline_at=deadline_at, **fields)

        return await self._wait(event, gather.Withdrawn, self._feed_gather, time_left_s, self._why_no_quorum)

    async def vote(self, time_left_s: float, **fields: Any) -> bool:
        """One rank's vote (the fields of commit.Voted); the decision. Raises a refusal."""

        def event(call: int) -> commit.Voted:
            return commit.Voted(call=call, **fields)

        return await self._wait(event, commit.Withdrawn, self._feed_commit, time_left_s, self._why_no_decision)

    def close(self, reason: str) -> None:
        """Every waiting rank gets `reason` at once; so does whoever asks from now on."""
        self._closed = Unreachable(reason)
        if self._join is not None:
            self._join.cancel()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(self._closed)

    async def _wait(self, event: Any, withdrawn: Any, feed: Any, time_left_s: float, why: Any) -> Any:
        if self._closed is not None:
            raise self._closed
        call = next(self._calls)
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        feed(event(call))
        limit = asyncio.timeout(time_left_s)
        try:
            async with limit:
                return await answer
        except TimeoutError:
            if not limit.expired():  # a refusal of that kind, with its own reason
                raise
            raise DeadlinePassed(f"{why()} within {time_left_s:.3g} s") from None
        finally:
            if self._waiting.pop(call, None) is not None:
                feed(withdrawn(call))

    def _why_no_quorum(self) -> str:
        size = self._me.group_world_size
        missing = [rank for rank in range(size) if rank not in self.gather.waiting]
        return f"ranks {missing} of {size} have not asked for a quorum" if missing else "the lighthouse gave no quorum"

    def _why_no_decision(self) -> str:
        return "the other ranks of the group have not voted"

    def _feed_gather(self, event: gather.Event) -> None:
        self._perform(self.gather.handle(event))

    def _feed_commit(self, event: commit.Event) -> None:
        self._perform(self.commit.handle(event))

    def _perform(self, effects: Sequence[gather.Effect | commit.Effect]) -> None:
        for effect in effects:
            match effect:
                case gather.GroupJoined():
                    self._start_join(effect)
                case gather.JoinTakenBack():
                    self._take_back()
                case gather.RoundAnswered(quorum_id, step):
                    self._feed_commit(commit.Opened(quorum_id, step))
                case gather.RankAnswered(call, assignment, quorum):
                    self._settle(call, (assignment, quorum))
                case commit.Decided(call, decision):
                    self._settle(call, decision)
                case gather.RankRefused(call, error) | commit.VoteRefused(call, error):
                    self._settle(call, error)

    def _settle(self, call: int, outcome: object) -> None:
        waiter = self._waiting.pop(call, None)
        if waiter is None or waiter.done():
            return
        if isinstance(outcome, LighthouseError):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)

    def _start_join(self, joined: gather.GroupJoined) -> None:
        self._link.incarnation = self.incarnation
        self._take_back()
        self._join = asyncio.create_task(self._run_join(joined), name=f"join round {joined.round}")

    def _take_back(self) -> None:
        if self._join is not None:
            self._join.cancel()
            self._join = None

    async def _run_join(self, joined: gather.GroupJoined) -> None:
        time_left_s = joined.deadline_at - asyncio.get_running_loop().time()
        try:
            quorum = await self._link.join(self._participant(joined), time_left_s)
        except LighthouseError as e:
            log.warning("no quorum for step %d: %s", joined.step, e)
            event: gather.Event = gather.JoinFailed(joined.round, e)
        else:
            event = gather.QuorumReceived(joined.round, quorum)
        self._join = None
        self._feed_gather(event)

    def _participant(self, joined: gather.GroupJoined) -> Participant:
        return replace(
            self._me,
            incarnation=self.incarnation,
            step=joined.step,
            shrink_only=joined.shrink_only,
            commit_failures=joined.commit_failures,
            tag_quorum_id=joined.tag_quorum_id,
            ranks_disagree=joined.ranks_disagree,
            seen_quorum_id=joined.seen_quorum_id,
            wire=_handles_on_the_wire(joined.handles),
        )


def _handles_on_the_wire(handles: tuple[str, ...]) -> bytes:
    """torchft's newer managers show their peers a handle per rank; ours relays them in the same field."""
    if not any(handles):
        return b""
    return torchft_pb2.QuorumMember(reconfigure_handles=handles).SerializeToString()
