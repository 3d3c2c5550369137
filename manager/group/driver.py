"""One replica group's manager: its machine is fed, its effects are performed in order, one timer is set again.

Synchronous: time, the ranks' streams and waiting calls, the session with the lighthouse and evidence are ports.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lighthouse_protocol.limits import answer_margin_s
from lighthouse_protocol.messages.incident import SelfReport
from lighthouse_protocol.messages.membership import Assignment, Decision, Participant, Quorum, World
from lighthouse_protocol.messages.progress import GroupView, HealTotals, ProgressSample
from lighthouse_protocol.messages.session import (
    EvidenceRequest,
    FromRank,
    Leaving,
    RankGone,
    Released,
    Revoked,
    ToLighthouse,
    ToManager,
    ToRank,
    Vote,
    VoteAnswer,
    Waiting,
    WatchHello,
    WatchOpened,
)
from lighthouse_protocol.messages.session import Killed as KilledMessage
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    NotPermitted,
    Unreachable,
    Unrecoverable,
    WrongState,
)
from lighthouse_protocol.rules.access import ADDRESS_WORD, is_proven
from lighthouse_protocol.rules.quorum_change import CHECKED_EVERY_S, QuorumWait
from lighthouse_protocol.rules.stall import GroupProgress, Limits, Process, StallVerdict
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Peer, Reply, Timer, Timers
from lighthouse_runtime.timing.timers import DeadlineTimer, StallWatch, SustainedNotice
from manager.group import events
from manager.group.counts import GroupStatus, say_missing
from manager.group.machine import GroupMachine
from manager.group.records import PendingVote, QuorumRequest
from manager.group.requests import check_rank
from manager.group.session import ProgressReporter

log = logging.getLogger(__name__)


# -- watches ------------------------------------------------------------------
#
# The open watches of the ranks.


@dataclass(eq=False, slots=True)
class Watch:
    """A rank's stream, and the process that it is of. `is_local`: that process is on this host, in this pid namespace.
    `heard_at`: when the rank last sent something, whatever that was. `healed`: its heals, as it has told them last."""

    hello: WatchHello
    peer: Peer[ToRank]
    is_local: bool
    heard_at: float
    is_open: bool = True
    healed: HealTotals | None = None


class WatchTable:
    """By number. Iterates over the open watches."""

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches.values())

    def get(self, number: int) -> Watch | None:
        """None: it has ended."""
        return self._watches.get(number)

    def add(self, number: int, watch: Watch) -> None:
        self._watches[number] = watch

    def remove(self, number: int) -> Watch | None:
        """None: it had ended before."""
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.is_open = False
            watch.peer.end()
        return watch

    def send(self, message: ToRank, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (watch := self._watches.get(number)) is not None:
                watch.peer.send(message)

    def send_all(self, message: ToRank) -> None:
        self.send(message, self._watches)


# -- waits --------------------------------------------------------------------
#
# Requests for a quorum that wait: if that lasts, the log and the ranks are told what for.
#
# A level, not an edge: a new watch is told what holds.


class Waits:
    """`waiting_for` says what for, in words; it is called only while requests wait."""

    def __init__(self, timers: Timers, watches: WatchTable, waiting_for: Callable[[], str]) -> None:
        self._clock = timers.time
        self._watches = watches
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._told = ""
        self._timer = DeadlineTimer(self._look, timers)

    def opened(self, watch: Watch) -> None:
        if self._told:
            watch.peer.send(Waiting(self._told))

    def answered(self) -> None:
        """A request was answered with a quorum."""
        if line := self._wait.finish(self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))

    def begin(self) -> None:
        """A request waits, and it is the first, or those before it were answered."""
        self._wait.begin(self._clock())
        self._timer.set_after(CHECKED_EVERY_S)

    def end(self) -> None:
        """No request waits."""
        self.close()
        self._wait.pause(self._clock())
        self._tell("")

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        waiting_for = self._waiting_for()
        if line := self._wait.next_line(waiting_for, self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))
        self._tell(waiting_for)
        self._timer.set_after(CHECKED_EVERY_S)

    def _tell(self, waiting_for: str) -> None:
        if waiting_for != self._told:
            self._told = waiting_for
            self._watches.send_all(Waiting(waiting_for))


# -- worlds -------------------------------------------------------------------
#
# The world, all replica groups with their ranks: the lighthouse tells it to the manager, and the manager to its
# ranks. Which ranks of this group are missing goes to the log, and to those that are there.

# Ranks of one group come one after the other: only a wait that lasts is worth a line.
INCOMPLETE_LOGGED_AFTER_S = 10.0


class Worlds:
    """`world` is the newest; None: the lighthouse has told none."""

    def __init__(self, timers: Timers, watches: WatchTable) -> None:
        self.world: World | None = None
        self._watches = watches
        self._incomplete = SustainedNotice(timers, self._say_missing, _log_whole, INCOMPLETE_LOGGED_AFTER_S)

    def opened(self, watch: Watch) -> None:
        if self.world is not None:
            watch.peer.send(self.world)

    def tell(self, world: World) -> None:
        if world.pending and (self.world is None or world.pending != self.world.pending):
            told = event("groups_join", groups=world.peers_pending)
            log.info("waiting to join: %s", world.joining_names, extra=told)
        self.world = world
        for watch in self._watches:
            watch.peer.send(world)

    def miss(self, incomplete: str) -> None:
        """Which ranks of the group are missing; empty: none, or all."""
        self._incomplete.set(incomplete)

    def close(self) -> None:
        self._incomplete.close()

    def _say_missing(self, incomplete: str) -> None:
        """Log it, and tell the ranks that are there: they may wait for the others before they ask for a quorum."""
        log.warning(
            "%s; a replica group joins only when all its ranks are connected", incomplete, extra=event("ranks_missing")
        )
        self._watches.send_all(Waiting(incomplete))


def _log_whole() -> None:
    log.info("all ranks of the group are connected", extra=event("ranks_complete"))


# -- progress -----------------------------------------------------------------
#
# Where the ranks are: samples come on their watches, a verdict goes to the log, and heartbeats carry the view.


class GroupProgressDriver:
    """`incarnation` is the group's present one. `check_lag` calls `was_late` if the process itself was held up."""

    def __init__(
        self,
        me: Participant,
        limits: Limits,
        timers: Timers,
        incarnation: Callable[[], str],
        check_lag: Callable[[], None] = lambda: None,
    ) -> None:
        self._size = me.group_world_size
        self._progress = GroupProgress(me.replica_id, limits)
        self._is_alone = False  # the only group of its quorum
        self._incarnation = incarnation
        self._newest: dict[int, Watch] = {}  # by rank
        self._clock = timers.time
        self._check_lag = check_lag
        self._watch = StallWatch(timers, log, "", self._verdict, self._progress.left_s, limits.floor_s)

    def opened(self, watch: Watch) -> None:
        self._newest[watch.hello.group_rank] = watch

    def answered(self, assignment: Assignment) -> None:
        """A rank was let into a step."""
        self._is_alone = assignment.replica_world_size == 1

    def take(self, watch: Watch, sample: ProgressSample) -> None:
        """A sample of an old watch says nothing of the rank's newer one."""
        hello = watch.hello
        if self._newest.get(hello.group_rank) is watch:
            process = Process(hello.rank_incarnation, hello.hostname, hello.pid)
            self._progress.add_sample(hello.group_rank, process, sample, self._clock())
            self._watch.wake()

    def ended(self, watch: Watch) -> None:
        group_rank = watch.hello.group_rank
        if self._newest.get(group_rank) is watch:
            del self._newest[group_rank]
            self._progress.remove_rank(group_rank)

    def was_late(self, by_s: float) -> None:
        """The whole process was held up; to be told before anything is judged."""
        self._progress.add_pause(by_s, self._clock())

    def view(self, now: float) -> GroupView:
        self._check_lag()
        return replace(self._progress.view(self._incarnation(), now), group_world_size=self._size)

    def close(self) -> None:
        self._watch.close()

    def _verdict(self, now: float) -> StallVerdict | None:
        self._check_lag()
        samples = [rank.sample for rank in self._progress.ranks(now)]
        is_among_itself = all(_is_within_group(sample) for sample in samples)
        is_complete = len(samples) == self._size and (is_among_itself or self._is_alone)
        return self._progress.verdict(now, is_complete=is_complete)


def _is_within_group(sample: ProgressSample) -> bool:
    """What it waits for is a rank of its own group."""
    return bool(sample.at) or (sample.collective is not None and sample.collective.within_group)


# -- ports --------------------------------------------------------------------
#
# What the group's driver needs of others in the same daemon.


class LighthousePort(Protocol):
    """The session with the lighthouse, and the connection that carries it.

    A new session is the driver's `opened`, a message `received`, the end of a session `closed`; after it the next one
    is opened for as long as the driver lives.
    """

    @property
    def error(self) -> str:
        """Why the lighthouse cannot be asked; empty: it can."""
        ...

    def send(self, message: ToLighthouse) -> None:
        """On the present session; without one, nothing happens."""
        ...

    def give_up(self, reason: str) -> None:
        """End this connection and make another."""
        ...

    def connect_beside(self, reason: str) -> None:
        """Make a second connection and move the session there once there is one."""
        ...

    def stay(self) -> None:
        """No second connection is needed."""
        ...


class EvidenceSource(Protocol):
    """Finds out what ranks are doing, and sends that to the lighthouse as it is found."""

    def opened(self, watch: Watch) -> None: ...

    def ended(self, watch: Watch) -> None: ...

    def answered(self, watch: Watch, own: SelfReport) -> None: ...

    def give(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        """`view`: where the ranks are, once all is found."""
        ...

    def close(self) -> None: ...


Answer = tuple[Assignment, Quorum | None]
"""To a request for a quorum: what it means for the rank, and the quorum, if it is a new one."""


@dataclass(frozen=True, slots=True)
class VoteReply:
    """The Reply to a vote goes by the watch that it came on."""

    peer: Peer[ToRank]
    number: int

    def answer(self, value: Decision) -> None:
        self.peer.send(VoteAnswer(self.number, value))

    def refuse(self, error: LighthouseError) -> None:
        self.peer.send(VoteAnswer(self.number, error))


@dataclass(slots=True)
class _Call:
    """`watch`: it ends with that."""

    reply: Reply[Any]
    watch: Watch | None = None
    expiry: Timer | None = None


class GroupDriver:
    """Ranks come by `ask`, `vote` and `open_watch`, the lighthouse by `opened`, `received` and `closed`."""

    def __init__(
        self,
        me: Participant,
        life: str,
        timers: Timers,
        link: LighthousePort,
        evidence: EvidenceSource,
        end: Callable[[int], None],
        *,
        secret: str = "",
        show_handles: Callable[[tuple[str, ...]], bytes] = lambda handles: b"",
        rank_timeout_s: float | None = None,
        limits: Limits | None = None,
        on_given_up: Callable[[events.RankGivenUp | events.GroupGivenUp], None] = lambda _: None,
        on_killed: Callable[[events.Killed], None] | None = None,
        check_lag: Callable[[], None] = lambda: None,
    ) -> None:
        """`me`, `life`, `secret`, `show_handles` and `rank_timeout_s` as in GroupMachine. `end` ends the daemon with a
        status: 0 when the group has left, 1 when it was killed. `limits` say when ranks stall. `on_given_up` is called
        for ranks that were lost and are not back, and for a group that does not fit its peers; `on_killed` in place of
        `end` for a group that is killed; `check_lag` calls `was_late` if the process itself was held up."""
        self._timers = timers
        self._clock = timers.time
        self._link = link
        self._evidence = evidence
        self._end = end
        self._on_given_up = on_given_up
        self._on_killed = on_killed or (lambda _: end(1))
        self._check_lag = check_lag
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._watches = WatchTable()
        self._progress = GroupProgressDriver(
            me, limits or Limits(), timers, lambda: self.machine.incarnation, check_lag
        )
        self._worlds = Worlds(timers, self._watches)
        self._waits = Waits(timers, self._watches, lambda: self.machine.status().waiting_for(link.error))
        self.machine = GroupMachine(
            me, life, show_handles, rank_timeout_s, ProgressReporter(self._progress.view), secret
        )
        self._timer = DeadlineTimer(self._tick, timers)
        self._closed: LighthouseError | None = None

    def describe(self, me: Participant) -> None:
        """The addresses, once they are known."""
        self.machine.me = me

    def status(self) -> GroupStatus:
        return self.machine.status()

    def was_late(self, by_s: float) -> None:
        """The whole process was held up; feed that before anything that has waited meanwhile."""
        self._progress.was_late(by_s)
        self._feed(events.WasLate(by_s))

    # -- calls of ranks. Each has a number, by which it is ended.

    def ask(self, reply: Reply[Answer], time_left_s: float, **fields: Any) -> int:
        """A rank's request for a quorum (the fields of QuorumRequest)."""
        within_s = _answer_within_s(time_left_s)
        ask = QuorumRequest(call=next(self._numbers), deadline_at=self._clock() + within_s, **fields)
        return self._begin(_Call(reply), ask, within_s, self._no_quorum)

    def vote(self, reply: Reply[Decision], time_left_s: float, **fields: Any) -> int:
        """A rank's vote (the fields of PendingVote)."""
        return self._cast(_Call(reply), time_left_s, **fields)

    def end_call(self, call: int) -> None:
        """Its caller has gone. After the answer this does nothing."""
        if (ended := self._calls.pop(call, None)) is not None:
            _stop(ended)
            self._feed(events.CallEnded(call))

    def report(self, group_rank: int, rank_incarnation: str, reason: str, *, ends_group: bool) -> None:
        """A rank is about to end, with `ends_group` its whole group.

        Raises InvalidRequest for one that the group does not have."""
        check_rank(group_rank, self.machine.me.group_world_size)
        self._feed(events.RankFailed(group_rank, rank_incarnation, reason, ends_group))

    def drain_for(self, group_rank: int, rank_incarnation: str, reason: str) -> None:
        """Drain, as a rank asks. Raises WrongState for a process that this manager does not watch."""
        check_rank(group_rank, self.machine.me.group_world_size)
        if not self.machine.watches.is_watched(group_rank, rank_incarnation):
            raise WrongState(f"rank {group_rank}: this process is not watched here, so it drains no group")
        log.info("%s: the group drains", reason, extra=event("drain_asked", reason=reason))
        self.drain(reason)

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """Where that rank serves its state. Raises a refusal for one that never asked, or is at another step."""
        return self.machine.checkpoint_address(group_rank, step)

    def check_peer(self, group_rank: int, quorum_id: int, proof: str) -> None:
        """Raises NotPermitted for a caller that asks for the address of an Agent, and is no member of its quorum."""
        secret = self.machine.secret_of(quorum_id)
        if self.machine.proves_itself and not is_proven(proof, secret, ADDRESS_WORD, quorum_id, group_rank):
            raise NotPermitted(
                f"quorum_id: where {self.machine.me.replica_id} serves its state is told to members of its quorum "
                "alone, and the caller does not prove that it is one"
            )

    def _told(self, assignment: Assignment) -> Assignment:
        return replace(assignment, secret=self.machine.secret_of(assignment.quorum_id))

    def ranks_started(self, group_ranks: Sequence[int] | None) -> None:
        """By a supervisor; None: all that were lost."""
        self._feed(events.RanksStarted(None if group_ranks is None else tuple(group_ranks)))

    # -- watches of ranks

    def open_watch(self, hello: WatchHello, peer: Peer[ToRank], *, is_local: bool) -> int:
        """The number of the watch. `is_local` as in Watch. Raises InvalidRequest for a rank that the group does not
        have."""
        check_rank(hello.group_rank, self.machine.me.group_world_size)
        number, watch = next(self._numbers), Watch(hello, peer, is_local, self._clock())
        self._watches.add(number, watch)
        self._progress.opened(watch)
        self._evidence.opened(watch)
        peer.send(WatchOpened())
        self._worlds.opened(watch)
        self._waits.opened(watch)
        if not hello.is_observer:
            self._feed(events.WatchOpened(number, hello.group_rank, hello.rank_incarnation))
        return number

    def receive(self, number: int, message: FromRank | None) -> None:
        """None: a message that this version does not know, which still shows that the rank runs."""
        watch = self._watches.get(number)
        if watch is None:
            return
        watch.heard_at = self._clock()
        match message:
            case Vote(vote, step, should_commit, quorum_id, wants_next, time_left_s):
                self._cast(
                    _Call(VoteReply(watch.peer, vote), watch),
                    time_left_s,
                    wants_next=wants_next,
                    group_rank=watch.hello.group_rank,
                    step=step,
                    vote=should_commit,
                    quorum_id=quorum_id,
                )
            case Leaving() if watch.hello.is_observer:
                self._progress.ended(watch)
            case Leaving(step):
                self._feed(events.RankLeaves(number, step))
            case ProgressSample():
                self._progress.take(watch, message)
                if message.healed is not None and message.healed != watch.healed:
                    watch.healed, hello = message.healed, watch.hello
                    self._feed(events.RankHealed(hello.group_rank, hello.rank_incarnation, message.healed))
            case SelfReport():
                self._evidence.answered(watch, message)
            case WatchHello():
                raise InvalidRequest("is only the first message of a watch", field="hello")
            case None:
                pass

    def end_watch(self, number: int) -> None:
        """The stream or the process of it has ended. More than once does no harm."""
        watch = self._watches.remove(number)
        if watch is None:
            return
        self._evidence.ended(watch)
        if not watch.hello.is_observer:  # one that has not left stays where it was, and gives no sign of life
            self._progress.ended(watch)
            self._feed(events.WatchEnded(number))
        for call in [call for call, waiting in self._calls.items() if waiting.watch is watch]:
            self.end_call(call)

    # -- the lighthouse

    def opened(self) -> None:
        self._feed(events.SessionOpened())

    def received(self, message: ToManager) -> None:
        self._feed(events.Received(message))

    def closed(self) -> None:
        self._feed(events.SessionClosed())

    # -- the end

    def drain(self, reason: str) -> None:
        """Do the steps that the others count on, and leave."""
        self._feed(events.DrainAsked(reason))

    def close(self, reason: str) -> None:
        """Every call that waits, or comes later, is refused with `reason`."""
        self._closed = Unreachable(reason)
        self._timer.cancel()
        self._progress.close()
        self._evidence.close()
        self._worlds.close()
        self._waits.close()
        for call in list(self._calls):
            self._refuse(call, self._closed)

    def kill(self, killed: events.Killed) -> None:
        """The ranks' Agents end with status 1, and so does this daemon, unless it is a supervisor's."""
        self._watches.send_all(KilledMessage(killed.reason))
        self._on_killed(killed)

    # -- waiting

    def _cast(self, call: _Call, time_left_s: float, **fields: Any) -> int:
        vote = PendingVote(call=next(self._numbers), **fields)
        return self._begin(call, vote, _answer_within_s(time_left_s), _no_decision)

    def _begin(
        self, call: _Call, event: QuorumRequest | PendingVote, within_s: float, why: Callable[[float], LighthouseError]
    ) -> int:
        """Answered, or refused with `why`, in that time."""
        number = event.call
        if self._closed is not None:
            call.reply.refuse(self._closed)
            return number
        self._calls[number] = call
        self._feed(event)
        if number in self._calls:  # a granted step is answered at once
            call.expiry = self._timers.call_later(within_s, self._expire, number, why, within_s)
        return number

    def _expire(self, call: int, why: Callable[[float], LighthouseError], within_s: float) -> None:
        error = why(within_s)
        self._refuse(call, error)
        self._feed(events.CallExpired(call, error))

    def _no_quorum(self, within_s: float) -> LighthouseError:
        status = self.status()
        if status.silent and status.is_gathering:
            size = status.me.group_world_size
            what = f"ranks {status.silent} of {size} have not asked for a quorum within {within_s:.3g} s"
            return DeadlinePassed(f"{what}; {say_missing(status.me, status.missing) or 'all are connected'}")
        if self._link.error:
            return Unreachable(f"lighthouse: {self._link.error}; tried for {within_s:.3g} s")
        return DeadlinePassed(f"the lighthouse gave no quorum within {within_s:.3g} s")

    # -- feed and perform

    def _feed(self, event: events.Event) -> None:
        self._check_lag()
        if self._closed is None:
            self._perform(self.machine.handle(event, self._clock()))

    def _tick(self) -> None:
        self._check_lag()
        self._perform(self.machine.tick(self._clock()))

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.QuorumAnswered(call, assignment, quorum):
                    if not assignment.revoked:  # its mates may already wait for the next one
                        self._waits.answered()
                    self._progress.answered(assignment)
                    self._answer(call, (replace(self._told(assignment), world=self._worlds.world), quorum))
                case events.VoteAnswered(call, Decision(commit, following)):
                    self._answer(call, Decision(commit, following and self._told(following)))
                case events.CallRefused(call, error):
                    if isinstance(error, Unrecoverable):
                        log.error("the ranks cannot continue: %s", error, extra=event("unrecoverable"))
                    self._refuse(call, error)
                case events.Sent(message):
                    self._link.send(message)
                case events.Pushed(message, watches):
                    _say_pushed(message, watches)
                    self._watches.send(message, watches)
                case events.MissingChanged(text):
                    self._worlds.miss(text)
                case events.WaitBegan():
                    self._waits.begin()
                case events.WaitEnded():
                    self._waits.end()
                case events.FailureReported(rank, reason, is_known):
                    if is_known:
                        level = logging.INFO if reason.startswith("KeyboardInterrupt") else logging.ERROR  # Ctrl-C
                        log.log(level, "rank %d failed: %s", rank, reason, extra=event("rank_failed", rank=rank))
                    else:
                        told = event("unknown_process_failed", rank=rank)
                        log.info("an unknown process reported that rank %d failed: %s", rank, reason, extra=told)
                case events.RankGivenUp(rank, reason):
                    told = event("rank_given_up", rank=rank)
                    if effect.is_expected:
                        log.info("%s", reason, extra=told)
                    else:
                        log.error("lost rank %d: %s", rank, reason, extra=told)
                    self._on_given_up(effect)
                case events.GroupGivenUp():
                    self._on_given_up(effect)
                case events.SessionGivenUp(reason):
                    self._link.give_up(reason)
                case events.SessionSilent(reason):
                    self._link.connect_beside(reason)
                case events.SessionHeard():
                    self._link.stay()
                case events.Killed(reason):
                    log.error("killed by the lighthouse: %s", reason, extra=event("killed", reason=reason))
                    self.kill(effect)
                case events.WorldChanged(world):
                    self._worlds.tell(world)
                case events.EvidenceWanted(request):
                    self._evidence.give(request, lambda: self._progress.view(self._clock()))
                case events.HasLeft(reason):
                    log.info("left the job: %s", reason, extra=event("left"))
                    self._end(0)
        self._timer.set(self.machine.deadline())

    def _answer(self, call: int, value: object) -> None:
        if (answered := self._calls.pop(call, None)) is not None:
            _stop(answered)
            answered.reply.answer(value)

    def _refuse(self, call: int, error: LighthouseError) -> None:
        if (refused := self._calls.pop(call, None)) is not None:
            _stop(refused)
            refused.reply.refuse(error)


def _say_pushed(message: ToRank, watches: tuple[int, ...]) -> None:
    match message:
        case Revoked(quorum_id, reason, lost):
            told = event("quorum_revoked", quorum_id=quorum_id, lost=lost or None)
            why = reason if not lost or reason.startswith(lost) else f"{lost}: {reason}"
            log.info("quorum %d revoked: %s", quorum_id, why, extra=told)
        case RankGone(group_rank, reason) if watches:
            log.error("ending the other ranks: %s", reason, extra=event("rank_gone", rank=group_rank))
        case Released():
            log.info("ranks that leave may end now", extra=event("ranks_released"))
        case _:
            pass


def _stop(call: _Call) -> None:
    if call.expiry is not None:
        call.expiry.cancel()


def _answer_within_s(time_left_s: float) -> float:
    """How long there is to find an answer, or a reason, that still reaches the caller."""
    return time_left_s - answer_margin_s(time_left_s) / 2


def _no_decision(within_s: float) -> LighthouseError:
    return DeadlinePassed(f"the other ranks of the group have not voted within {within_s:.3g} s")
