"""The loop's side of the group's machine: feed an event, perform the effects, re-arm one timer.

A waiting RPC is a future.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum, Vote
from lighthouse_protocol.messages.session import Killed as KilledMessage
from lighthouse_protocol.messages.session import ToManager, WatchRequest
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable, Unrecoverable
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.server.streams import Sender
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer
from manager.group.lighthouse_link import LighthouseLink
from manager.group.ports import EvidenceSource
from manager.group.progress import GroupProgressDriver
from manager.group.rules import commit, gather
from manager.group.rules.events import (
    CallEnded,
    CallExpired,
    CallRefused,
    DrainAsked,
    Effect,
    Event,
    EvidenceWanted,
    GroupGivenUp,
    HasLeft,
    Killed,
    Pushed,
    QuorumAnswered,
    RankFailed,
    RankGivenUp,
    RankLeaves,
    RanksStarted,
    Received,
    Sent,
    SessionClosed,
    SessionGivenUp,
    SessionHeard,
    SessionOpened,
    SessionSilent,
    VoteAnswered,
    VoteCast,
    WatchEnded,
    WorldChanged,
)
from manager.group.rules.events import WatchOpened as RankWatched
from manager.group.rules.machine import GroupMachine
from manager.group.rules.progress import ProgressReporter
from manager.group.rules.request import QuorumRequest, check_rank
from manager.group.waits import Waits
from manager.group.watches import Watchers
from manager.group.worlds import Worlds

log = logging.getLogger(__name__)

T = TypeVar("T")


class Waiting(NamedTuple, Generic[T]):
    """A call of a rank, and what will be its answer."""

    call: int
    answer: "asyncio.Future[T]"


class GroupDriver:
    """`me` is this group's participant but for what changes from join to join; `life` names the manager's start.

    `end` ends the daemon with a status. `rank_timeout_s` as in GroupMachine. `on_given_up` hears of ranks that were
    lost and are not back, and of a group that does not fit its peers.
    """

    def __init__(
        self,
        me: Participant,
        life: str,
        link: LighthouseLink,
        evidence: EvidenceSource,
        end: Callable[[int], None],
        rank_timeout_s: float | None = None,
        limits: Limits | None = None,
        on_given_up: Callable[[RankGivenUp | GroupGivenUp], None] = lambda _: None,
    ) -> None:
        """`limits` say when ranks stall."""
        self.places = GroupProgressDriver(me, limits or Limits(), self._trains_alone, lambda: self.machine.incarnation)
        self.machine = GroupMachine(me, life, _handles_on_the_wire, rank_timeout_s, ProgressReporter(self.places.view))
        self.worlds = Worlds()
        self.evidence = evidence
        self._link = link
        self._end = end
        self._on_given_up = on_given_up
        self._clock = asyncio.get_running_loop().time
        self._timer = DeadlineTimer(self._tick, asyncio.get_running_loop())
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._waits = Waits(lambda: self.machine.waiting_for(link.error))
        self._watchers = Watchers(self.places, self.worlds, self._waits, self.evidence)
        self._closed: LighthouseError | None = None
        self._left = asyncio.Event()

    @property
    def gather(self) -> gather.GatherMachine:
        return self.machine.ranks.gather

    @property
    def phase(self) -> str:
        if self.gather.is_joined:
            return "joined"
        if self.machine.ranks.waiting:
            return "gathering"
        return "voting" if self.machine.ranks.commit.is_voting else "idle"

    def _trains_alone(self) -> bool:
        return self.machine.ranks.participants == 1

    def describe(self, me: Participant) -> None:
        """The addresses, once they are known."""
        self.machine.me = me

    async def run(self) -> None:
        """The sessions with the lighthouse, until cancelled."""
        await self._link.run(self._opened, self._received, lambda: self._feed(SessionClosed()))

    # -- ranks

    async def ask(self, time_left_s: float, **fields: Any) -> tuple[Assignment, Quorum | None]:
        """One rank's request (the fields of Ask). Raises a refusal, at the latest when its time is over."""
        deadline_at = self._clock() + time_left_s

        def event(call: int) -> Event:
            return QuorumRequest(call=call, deadline_at=deadline_at, **fields)

        return await self._wait(self._begin(event, time_left_s, self._no_quorum))

    async def vote(self, time_left_s: float, *, wants_next: bool = False, **fields: Any) -> Vote:
        """One rank's vote (the fields of commit.Voted); the decision. Raises a refusal."""
        return await self._wait(self.cast(time_left_s, wants_next=wants_next, **fields))

    def cast(self, time_left_s: float, *, wants_next: bool, **fields: Any) -> "Waiting[Vote]":
        """The same without waiting; often it is decided at once. Raises Unreachable after close()."""

        def event(call: int) -> Event:
            return VoteCast(commit.Voted(call=call, **fields), wants_next)

        return self._begin(event, time_left_s, _no_decision)

    def end_call(self, call: int) -> None:
        """Nobody waits for its answer any more, if it has none yet."""
        if (answer := self._waiting.pop(call, None)) is not None:
            answer.cancel()  # and with it its expiry
            self._feed(CallEnded(call))

    def open_watch(self, request: WatchRequest, sender: Sender, *, is_here: bool) -> int:
        """The number of the watch. `is_here`: the rank is on this host, in this pid namespace. Raises InvalidRequest
        for a rank that the group does not have."""
        check_rank(request.group_rank, self.machine.me.group_world_size)
        watch = next(self._numbers)
        self._watchers.opened(watch, request, sender, is_here=is_here)
        self._feed(RankWatched(watch, request.group_rank, request.worker))
        return watch

    def end_watch(self, watch: int) -> None:
        """The stream or the process of it has ended. More than once does no harm."""
        if self._watchers.ended(watch):
            self._feed(WatchEnded(watch))

    def leave_watch(self, watch: int, step: int | None) -> None:
        """Its rank closes its Agent in good order; `step` as in Leaving."""
        self._feed(RankLeaves(watch, step))

    def report(self, group_rank: int, worker: str, reason: str, *, ends_group: bool) -> None:
        """A rank is about to end, with `ends_group` its whole group.

        Raises InvalidRequest for one that the group does not have."""
        check_rank(group_rank, self.machine.me.group_world_size)
        if not self.machine.ranks.watches.is_watched(group_rank, worker):
            log.info("a process that this manager does not watch says that rank %d has failed: %s", group_rank, reason)
            return
        log.error("rank %d has failed: %s", group_rank, reason)
        self._feed(RankFailed(group_rank, worker, reason, ends_group))

    def ranks_started(self) -> None:
        """By a supervisor."""
        self._feed(RanksStarted())

    # -- the end

    async def leave(self, reason: str, timeout_s: float) -> None:
        """Do the steps that the others count on, and leave; at most for so long."""
        self._feed(DrainAsked(reason))
        try:
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        except TimeoutError:
            log.warning("the ranks have not finished their step within %g s; leaving all the same", timeout_s)

    def close(self, reason: str) -> None:
        """Every waiting rank gets `reason` at once; so does whoever asks from now on."""
        self._closed = Unreachable(reason)
        self._timer.cancel()
        self._watchers.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(self._closed)

    def kill(self, reason: str) -> None:
        """The ranks' Agents end with status 1, and so does this daemon."""
        self._watchers.push_all(KilledMessage(reason))
        self._end(1)

    # -- waiting

    def _begin(
        self, event: Callable[[int], Event], time_left_s: float, why: Callable[[float], LighthouseError]
    ) -> "Waiting[Any]":
        """Answered, or refused with `why`, in that time."""
        if self._closed is not None:
            raise self._closed
        loop = asyncio.get_running_loop()
        call = next(self._numbers)
        answer = self._waiting[call] = loop.create_future()
        self._feed(event(call))
        if not answer.done():  # a granted step is answered at once
            expiry = loop.call_later(time_left_s, lambda: self._expire(call, why(time_left_s)))
            answer.add_done_callback(lambda _: expiry.cancel())
        return Waiting(call, answer)

    def _expire(self, call: int, error: LighthouseError) -> None:
        if (answer := self._waiting.pop(call, None)) is not None and not answer.done():
            answer.set_exception(error)
            self._feed(CallExpired(call, error))

    async def _wait(self, waiting: "Waiting[T]") -> T:
        try:
            return await waiting.answer
        finally:
            self.end_call(waiting.call)

    def _no_quorum(self, time_left_s: float) -> LighthouseError:
        size, waiting = self.machine.me.group_world_size, self.machine.ranks.waiting
        silent = [rank for rank in range(size) if rank not in waiting]
        if silent and self.gather.waiting:
            what = f"ranks {silent} of {size} have not asked for a quorum within {time_left_s:.3g} s"
            return DeadlinePassed(f"{what}; {self.machine.incomplete or 'all are here'}")
        if self._link.error:
            return Unreachable(f"lighthouse: {self._link.error}; tried for {time_left_s:.3g} s")
        return DeadlinePassed(f"the lighthouse gave no quorum within {time_left_s:.3g} s")

    # -- feed and perform

    def _opened(self) -> None:
        self._feed(SessionOpened())

    def _received(self, message: ToManager) -> None:
        self._feed(Received(message))

    def _feed(self, event: Event) -> None:
        if self._closed is None:
            self._perform(self.machine.handle(event, self._clock()))

    def _tick(self) -> None:
        self._perform(self.machine.tick(self._clock()))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case QuorumAnswered(call, assignment, quorum):
                    if not assignment.revoked:  # its mates may already wait for the next one
                        self._waits.answered()
                    self._settle(call, (assignment, quorum))
                case VoteAnswered(call, decision, following):
                    self._settle(call, Vote(decision, following))
                case CallRefused(call, error):
                    if isinstance(error, Unrecoverable):
                        log.error("the ranks cannot go on: %s", error)
                    self._settle(call, error)
                case Sent(message):
                    self._link.send(message)
                case Pushed(message, watches):
                    log.info("to the ranks: %s", message)
                    self._watchers.push(message, watches)
                case RankGivenUp(rank, reason):
                    log.error("rank %d is given up: %s", rank, reason)
                    self._on_given_up(effect)
                case GroupGivenUp():
                    self._on_given_up(effect)
                case SessionGivenUp(reason):
                    self._link.give_up(reason)
                case SessionSilent(reason):
                    self._link.connect_beside(reason)
                case SessionHeard():
                    self._link.stay()
                case Killed(reason):
                    log.error("killed by the lighthouse: %s", reason)
                    self.kill(reason)
                case WorldChanged(world):
                    self.worlds.tell(world)
                case EvidenceWanted(request):
                    self.evidence.give(request)
                case HasLeft(reason):
                    log.info("has left: %s", reason)
                    self._left.set()
                    self._end(0)
        self.worlds.look(self.machine.incomplete)
        self._waits.look(is_waiting=bool(self.machine.ranks.waiting))
        self._timer.set(self.machine.deadline())

    def _settle(self, call: int, outcome: object) -> None:
        waiter = self._waiting.pop(call, None)
        if waiter is None or waiter.done():
            return
        if isinstance(outcome, LighthouseError):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)


def _no_decision(time_left_s: float) -> LighthouseError:
    return DeadlinePassed(f"the other ranks of the group have not voted within {time_left_s:.3g} s")


def _handles_on_the_wire(handles: tuple[str, ...]) -> bytes:
    """torchft's newer managers show their peers a handle per rank; ours relays them in the same field."""
    if not any(handles):
        return b""
    return torchft_pb2.QuorumMember(reconfigure_handles=handles).SerializeToString()
