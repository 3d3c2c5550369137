"""The group: its machine is fed, its effects are performed in order, one timer is set again.

Synchronous: time, the ranks' watches and calls, the session and the evidence are ports, so the simulator runs this very
code.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lighthouse_protocol.limits import answer_margin_s
from lighthouse_protocol.messages.evidence import SelfReport
from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum, Vote
from lighthouse_protocol.messages.progress import Sample
from lighthouse_protocol.messages.session import (
    Ballot,
    Counted,
    FromRank,
    Leaving,
    ToManager,
    ToRank,
    WatchOpened,
    WatchRequest,
)
from lighthouse_protocol.messages.session import Killed as KilledMessage
from lighthouse_protocol.refusals import DeadlinePassed, InvalidRequest, LighthouseError, Unreachable, Unrecoverable
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.ports import Peer, Reply, Timer, Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer
from manager.group.ports import EvidenceSource, Link
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
from manager.group.watches import Watch, WatchTable
from manager.group.worlds import Worlds

log = logging.getLogger(__name__)

Asked = tuple[Assignment, Quorum | None]
Why = Callable[[float], LighthouseError]


@dataclass(slots=True)
class _Waiting:
    """A call of a rank. `limit`: the end of its time."""

    reply: Reply[Any]
    limit: Timer | None = None


@dataclass(frozen=True, slots=True)
class BallotReply:
    """A vote by a watch. A lighthouse_runtime.ports.Reply."""

    peer: Peer[ToRank]
    number: int

    def answer(self, value: Vote) -> None:
        self.peer.send(Counted(self.number, value))

    def refuse(self, error: LighthouseError) -> None:
        self.peer.send(Counted(self.number, error))


class GroupDriver:
    """`me` is this group's participant but for what changes from join to join; `life` names the manager's start.

    `end` ends the daemon with a status: 0 after the group has left. `rank_timeout_s` and `show_handles` as in
    GroupMachine; `limits` say when ranks stall. `on_given_up` hears of ranks that were lost and are not back, and of a
    group that does not fit its peers. What comes by `link` is told by opened, received and closed.
    """

    def __init__(
        self,
        me: Participant,
        life: str,
        timers: Timers,
        link: Link,
        evidence: EvidenceSource,
        end: Callable[[int], None],
        rank_timeout_s: float | None = None,
        limits: Limits | None = None,
        on_given_up: Callable[[RankGivenUp | GroupGivenUp], None] = lambda _: None,
        show_handles: Callable[[tuple[str, ...]], bytes] = lambda handles: b"",
    ) -> None:
        self.places = GroupProgressDriver(
            me, limits or Limits(), timers, self._trains_alone, lambda: self.machine.incarnation
        )
        self.machine = GroupMachine(me, life, show_handles, rank_timeout_s, ProgressReporter(self.places.view))
        self._timers = timers
        self._clock = timers.time
        self._timer = DeadlineTimer(self._tick, timers)
        self._link = link
        self._evidence = evidence
        self._end = end
        self._on_given_up = on_given_up
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._watches = WatchTable()
        self.worlds = Worlds(self._watches, timers)
        self._waits = Waits(self._watches, timers, lambda: self.machine.waiting_for(link.error))
        self._closed: LighthouseError | None = None

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

    # -- the session

    def opened(self) -> None:
        self._feed(SessionOpened())

    def received(self, message: ToManager) -> None:
        self._feed(Received(message))

    def closed(self) -> None:
        self._feed(SessionClosed())

    # -- calls of ranks

    def ask(self, time_left_s: float, reply: Reply[Asked], **fields: Any) -> int:
        """One rank's request (the fields of QuorumRequest): answered or refused within its time. The number of the
        call. Raises Unreachable after close()."""
        deadline_at = self._clock() + time_left_s
        make: Callable[[int], Event] = lambda call: QuorumRequest(call=call, deadline_at=deadline_at, **fields)  # noqa: E731
        return self._begin(make, time_left_s, self._no_quorum, reply)

    def vote(self, time_left_s: float, reply: Reply[Vote], *, wants_next: bool = False, **fields: Any) -> int:
        """One rank's vote (the fields of commit.Voted): its decision, or a refusal. As `ask`."""
        make: Callable[[int], Event] = lambda call: VoteCast(commit.Voted(call=call, **fields), wants_next)  # noqa: E731
        return self._begin(make, time_left_s, _no_decision, reply)

    def end_call(self, call: int) -> None:
        """Nobody waits for its answer any more, if it has none yet."""
        if self._take(call) is not None:
            self._feed(CallEnded(call))

    # -- watches of ranks

    def open_watch(self, request: WatchRequest, peer: Peer[ToRank], *, is_here: bool) -> int:
        """The number of the watch. `is_here`: the rank is on this host, in this pid namespace. Raises InvalidRequest
        for a rank that the group does not have."""
        check_rank(request.group_rank, self.machine.me.group_world_size)
        number, watch = next(self._numbers), Watch(peer, request, is_here)
        self._watches.add(number, watch)
        self.places.opened(number, request)
        self._evidence.opened(number, watch)
        peer.send(WatchOpened())
        self.worlds.opened(watch)
        self._waits.opened(watch)
        self._feed(RankWatched(number, request.group_rank, request.worker))
        return number

    def receive(self, number: int, message: FromRank | None) -> None:
        """By a watch; None: what this version cannot read."""
        watch = self._watches.get(number)
        if watch is None:
            return
        self._evidence.heard(number, watch.request.group_rank)
        match message:
            case Ballot():
                self._cast(watch, message)
            case Leaving(step):
                self._feed(RankLeaves(number, step))
            case Sample():
                self.places.take(number, message)
            case SelfReport():
                self._evidence.answered(number, message)
            case WatchRequest():
                raise InvalidRequest("came twice", field="hello")
            case None:
                pass

    def _cast(self, watch: Watch, ballot: Ballot) -> None:
        reply = BallotReply(watch.peer, ballot.number)
        try:
            call = self.vote(
                time_to_answer_s(ballot.time_left_s),
                reply,
                wants_next=ballot.wants_next,
                group_rank=watch.request.group_rank,
                step=ballot.step,
                vote=ballot.vote,
                quorum_id=ballot.quorum_id,
            )
        except LighthouseError as error:
            return reply.refuse(error)
        watch.votes = {vote for vote in (*watch.votes, call) if vote in self._waiting}
        return None

    def end_watch(self, number: int) -> None:
        """The stream or the process of it has ended. More than once does no harm."""
        watch = self._watches.remove(number)
        if watch is not None:
            watch.peer.end()
            self.places.ended(number)
            self._evidence.ended(number)
            self._feed(WatchEnded(number))
            for vote in watch.votes:
                self.end_call(vote)

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

    def leave(self, reason: str) -> None:
        """Do the steps that the others count on, and leave; then the daemon ends with status 0."""
        self._feed(DrainAsked(reason))

    def close(self, reason: str) -> None:
        """Every waiting rank gets `reason` at once; so does whoever asks from now on."""
        self._closed = Unreachable(reason)
        self._timer.cancel()
        self.places.close()
        self._evidence.close()
        self.worlds.close()
        self._waits.close()
        for call in list(self._waiting):
            self._settle(call, self._closed)

    def kill(self, reason: str) -> None:
        """The ranks' Agents end with status 1, and so does this daemon."""
        self._watches.tell_all(KilledMessage(reason))
        self._end(1)

    # -- waiting

    def _begin(self, make: Callable[[int], Event], time_left_s: float, why: Why, reply: Reply[Any]) -> int:
        """Answered, or refused with `why`, in that time."""
        if self._closed is not None:
            raise self._closed
        call = next(self._numbers)
        waiting = self._waiting[call] = _Waiting(reply)
        self._feed(make(call))
        if call in self._waiting:  # a granted step is answered at once
            waiting.limit = self._timers.call_later(time_left_s, self._expire, call, time_left_s, why)
        return call

    def _expire(self, call: int, time_left_s: float, why: Why) -> None:
        error = why(time_left_s)
        self._settle(call, error)
        self._feed(CallExpired(call, error))

    def _take(self, call: int) -> Reply[Any] | None:
        waiting = self._waiting.pop(call, None)
        if waiting is None:
            return None
        if waiting.limit is not None:
            waiting.limit.cancel()
        return waiting.reply

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
                    self._watches.tell(watches, message)
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
                    self._evidence.give(request)
                case HasLeft(reason):
                    log.info("has left: %s", reason)
                    self._end(0)
        self.worlds.look(self.machine.incomplete)
        self._waits.look(is_waiting=bool(self.machine.ranks.waiting))
        self._timer.set(self.machine.deadline())

    def _settle(self, call: int, outcome: object) -> None:
        reply = self._take(call)
        if reply is None:
            return
        if isinstance(outcome, LighthouseError):
            reply.refuse(outcome)
        else:
            reply.answer(outcome)


def time_to_answer_s(left_s: float) -> float:
    """How long there is to find an answer, or a reason, that still reaches the caller."""
    return left_s - answer_margin_s(left_s) / 2


def _no_decision(time_left_s: float) -> LighthouseError:
    return DeadlinePassed(f"the other ranks of the group have not voted within {time_left_s:.3g} s")
