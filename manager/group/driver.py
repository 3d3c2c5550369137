"""Driver of one replica group's manager.

`GroupDriver` feeds events to a `GroupMachine`, performs the effects in order and sets one timer for the state machine's
next deadline. It is synchronous. The clock, the ranks' streams and calls, the session with the lighthouse and the
evidence collector are passed in, so the simulator runs the same code. `RankNotices` notifies the ranks of waits, the
job's size and preemptions. `GroupProgressDriver` collects progress samples and detects stalls.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lighthouse_protocol.limits import answer_margin_s
from lighthouse_protocol.messages.incident import SelfReport
from lighthouse_protocol.messages.membership import Assignment, Decision, Participant, Quorum, World
from lighthouse_protocol.messages.preemption import (
    PreemptionChanged,
    PreemptionNoted,
    PreemptionNotice,
    PreemptionReport,
)
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
from lighthouse_runtime.timing.timers import DeadlineTimer, DelayedAlert, LoopLag, StallWatch
from manager.group import events
from manager.group.counts import GroupStatus, describe_missing
from manager.group.events import PendingVote, QuorumRequest
from manager.group.machine import GroupMachine
from manager.group.requests import check_rank
from manager.group.session import ProgressReporter

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Watch:
    """Stream that a rank's process keeps open to its manager."""

    hello: WatchHello
    peer: Peer[ToRank]
    is_local: bool  # the process runs on this host, in this pid namespace
    heard_at: float  # when the last message arrived
    is_open: bool = True
    is_newest: bool = True  # no later process of the rank has opened a watch, and this process has not left
    healed: HealTotals | None = None  # from the last sample that contained heal totals


Watches = dict[int, Watch]
"""The open watches, by number."""


# A group's ranks do not connect at the same moment, so missing ranks are logged only after this time.
INCOMPLETE_LOGGED_AFTER_S = 10.0


class RankNotices:
    """Notifies the ranks of waits, the size of the job and preemptions. Logs long waits and missing ranks.

    `waiting_for` returns the reason why requests for a quorum are waiting, and is called only while a request waits.
    """

    def __init__(self, timers: Timers, watches: Watches, waiting_for: Callable[[], str]) -> None:
        self.world: World | None = None  # last one received from the lighthouse
        self._preemption = PreemptionChanged(None)
        self._clock = timers.time
        self._watches = watches
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._reason = ""  # the last reason that was sent to the ranks
        self._timer = DeadlineTimer(self._check_wait, timers)
        self._incomplete = DelayedAlert(timers, self._report_missing, INCOMPLETE_LOGGED_AFTER_S)

    def send_notices(self, watch: Watch) -> None:
        if self.world is not None:
            watch.peer.send(self.world)
        if self._reason:
            watch.peer.send(Waiting(self._reason))
        if self._preemption.notice is not None:
            watch.peer.send(self._preemption)

    def update_world(self, world: World) -> None:
        if world.pending and (self.world is None or world.pending != self.world.pending):
            fields = event("groups_join", groups=world.peers_pending)
            log.info("waiting to join: %s", world.joining_names, extra=fields)
        self.world = world
        self._send(world)

    def set_preemption(self, preemption: PreemptionChanged) -> None:
        if preemption != self._preemption:
            self._preemption = preemption
            self._send(preemption)

    def set_missing(self, incomplete: str) -> None:
        """Set the text that names the missing ranks. It is empty if no rank or every rank is missing."""
        self._incomplete.set(incomplete)

    def end_wait(self) -> None:
        """Record that a request has been answered. If the wait for a quorum was long, log how long it took."""
        if line := self._wait.finish(self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))

    def set_waiting(self, is_waiting: bool) -> None:
        """Begin or end the wait for a quorum. After `end_wait`, pass True again if other requests are still waiting."""
        if is_waiting:
            self._wait.begin(self._clock())
            self._timer.set_after(CHECKED_EVERY_S)
        else:
            self._timer.cancel()
            self._wait.pause(self._clock())
            self._send_reason("")

    def close(self) -> None:
        self._timer.cancel()
        self._incomplete.close()

    def _check_wait(self) -> None:
        waiting_for = self._waiting_for()
        if line := self._wait.next_line(waiting_for, self._clock()):
            log.info("%s", line, extra=event("quorum_wait"))
        self._send_reason(waiting_for)
        self._timer.set_after(CHECKED_EVERY_S)

    def _send_reason(self, waiting_for: str) -> None:
        if waiting_for != self._reason:
            self._reason = waiting_for
            self._send(Waiting(waiting_for))

    def _report_missing(self, incomplete: str) -> None:
        """Log which ranks are missing, and notify the connected ranks, which may be waiting for the missing ones.

        `incomplete` describes the missing ranks, and is empty if all ranks are connected.
        """
        if not incomplete:
            log.info("all ranks of the group are connected", extra=event("ranks_complete"))
            return
        log.warning(
            "%s; a replica group joins only when all its ranks are connected", incomplete, extra=event("ranks_missing")
        )
        self._send(Waiting(incomplete))

    def _send(self, message: ToRank) -> None:
        for watch in self._watches.values():
            watch.peer.send(message)


class GroupProgressDriver:
    """Collects the ranks' progress samples, logs stalls and returns the group's progress for heartbeats.

    `incarnation` returns the group's current incarnation. `lag` detects pauses of this process, during which no samples
    are read.
    """

    def __init__(
        self,
        me: Participant,
        limits: Limits,
        timers: Timers,
        incarnation: Callable[[], str],
        lag: LoopLag,
    ) -> None:
        self._size = me.group_world_size
        self._progress = GroupProgress(me.replica_id, limits)
        self._is_alone = False  # the only group of its quorum
        self._incarnation = incarnation
        self._clock = timers.time
        self._check_lag = lag.check
        self._watch = StallWatch(timers, log, "", self, limits.floor_s)

    def record_assignment(self, assignment: Assignment) -> None:
        """Record whether this group is alone in its quorum. Call this with each assignment that a rank receives."""
        self._is_alone = assignment.replica_world_size == 1

    def add_sample(self, watch: Watch, sample: ProgressSample) -> None:
        """Record a progress sample, unless the rank has a newer watch."""
        hello = watch.hello
        if watch.is_newest:
            process = Process(hello.rank_incarnation, hello.hostname, hello.pid)
            self._progress.add_sample(hello.group_rank, process, sample, self._clock())
            self._watch.wake()

    def remove_watch(self, watch: Watch) -> None:
        if watch.is_newest:
            watch.is_newest = False
            self._progress.remove_rank(watch.hello.group_rank)

    def handle_pause(self, by_s: float) -> None:
        """Record that this process was paused for `by_s` seconds, which do not count as time without progress.

        Call this before `judge_ranks` next decides whether ranks are stalled.
        """
        self._progress.add_pause(by_s, self._clock())

    def view(self, now: float) -> GroupView:
        """Return the group's progress at time `now`.

        The state machine calls this while it handles an event, so this method must not pass it another event.
        """
        return replace(self._progress.view(self._incarnation(), now), group_world_size=self._size)

    def close(self) -> None:
        self._watch.close()

    def judge_ranks(self, now: float) -> StallVerdict | None:
        self._check_lag()
        samples = [rank.sample for rank in self._progress.ranks(now)]
        is_among_itself = all(_is_within_group(sample) for sample in samples)
        is_complete = len(samples) == self._size and (is_among_itself or self._is_alone)
        return self._progress.verdict(now, is_complete=is_complete)

    def verdict_in_s(self, now: float) -> float | None:
        return self._progress.left_s(now)

    def handle_verdict(self, verdict: StallVerdict | None) -> None:
        """Do nothing. StallWatch has already logged the verdict, and incidents are opened by the lighthouse."""


def _is_within_group(sample: ProgressSample) -> bool:
    """Return whether the rank's most recent collective involves only its group. True for a rank without an Agent."""
    return bool(sample.at) or (sample.collective is not None and sample.collective.within_group)


class LighthousePort(Protocol):
    """Interface to the session with the lighthouse, and to the connection that carries it.

    An implementation calls the driver's `begin_session`, `handle_message` and `end_session`, and opens a new session
    whenever one ends.
    """

    @property
    def error(self) -> str:
        """Reason why the lighthouse is unreachable or refuses the group, or an empty string if there is no problem."""
        ...

    def send(self, message: ToLighthouse) -> None:
        """Send a message on the current session, or drop the message if there is none."""
        ...

    def give_up(self, reason: str) -> None:
        """Close the connection because of `reason`, and open a new one."""
        ...

    def connect_second(self, reason: str) -> None:
        """Open a second connection, and move the session there once it is established. `reason` is logged."""
        ...

    def cancel_second(self) -> None:
        """Stop opening a second connection, because the first one works again."""
        ...


class EvidenceSource(Protocol):
    """Interface to the evidence collector, which finds out what the ranks are doing."""

    def add_watch(self, watch: Watch) -> None: ...

    def drop_watch(self, watch: Watch) -> None: ...

    def take_self_report(self, watch: Watch, own: SelfReport) -> None: ...

    def collect_evidence(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        """Collect and send the requested evidence, then send the ranks' progress, which `view` returns."""
        ...

    def close(self) -> None: ...


Outcome = events.RankGivenUp | events.GroupGivenUp | events.Killed | events.GroupLeft | PreemptionNoted
Answer = tuple[Assignment, Quorum | None]
"""Answer to a request for a quorum: the rank's assignment, and the quorum, or None if it is a grant."""


@dataclass(slots=True)
class _Call:
    """A rank's request or vote that is waiting for its answer. A vote arrives as an RPC or on the rank's watch."""

    event: QuorumRequest | PendingVote
    reply: Reply[Any] | None  # None for a vote on a watch
    watch: Watch | None = None  # watch on which the vote arrived; the call ends with it
    vote: int = 0  # number of the vote on its watch
    expiry: Timer | None = None

    def send_answer(self, value: Any) -> None:
        """Send `value` as the answer, or as a refusal if it is an error."""
        if self.expiry is not None:
            self.expiry.cancel()
        if self.watch is not None:
            self.watch.peer.send(VoteAnswer(self.vote, value))
        elif self.reply is not None:
            (self.reply.refuse if isinstance(value, LighthouseError) else self.reply.answer)(value)


class GroupDriver:
    """Feeds events to one group's state machine, and performs the effects that it returns.

    Ranks call `ask`, `vote` and `open_watch`. The link calls `begin_session`, `handle_message` and `end_session`.
    `me`, `manager_incarnation`, `secret`, `encode_handles` and `rank_timeout_s` are passed on to GroupMachine.

    Args:
        timers: The clock.
        link: The session with the lighthouse.
        evidence: The evidence collector.
        report: Receives each `Outcome`, which the daemon or its supervisor handles.
        limits: Time limits after which a rank counts as stalled.
        lag: Detects pauses of this process.
    """

    def __init__(
        self,
        me: Participant,
        manager_incarnation: str,
        timers: Timers,
        link: LighthousePort,
        evidence: EvidenceSource,
        report: Callable[[Outcome], object],
        *,
        secret: str = "",
        encode_handles: Callable[[tuple[str, ...]], bytes] = lambda handles: b"",
        rank_timeout_s: float | None = None,
        limits: Limits | None = None,
        lag: LoopLag | None = None,
    ) -> None:
        self._timers = timers
        self._clock = timers.time
        self._link = link
        self._evidence = evidence
        self._report = report
        self._lag = lag or LoopLag(timers)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._watches: Watches = {}
        self._progress = GroupProgressDriver(
            me, limits or Limits(), timers, lambda: self.machine.incarnation, self._lag
        )
        self._notices = RankNotices(timers, self._watches, lambda: self.machine.status().waiting_for(link.error))
        self.machine = GroupMachine(
            me, manager_incarnation, encode_handles, rank_timeout_s, ProgressReporter(self._progress.view), secret
        )
        self._timer = DeadlineTimer(self._tick, timers)
        self._closed: LighthouseError | None = None
        self._logged_quorum_id: int | None = None
        self._preemption: PreemptionReport | None = None
        self._lag.listen(self.handle_pause)

    @property
    def me(self) -> Participant:
        return self.machine.group.me

    @property
    def has_ranks(self) -> bool:
        return self.machine.watches.has_ranks

    def describe(self, me: Participant) -> None:
        """Replace the description of this group as a participant, once its addresses are known."""
        self.machine.group.me = me

    def status(self) -> GroupStatus:
        return self.machine.status()

    def handle_pause(self, by_s: float) -> None:
        """Postpone all timeouts by the `by_s` seconds for which this process was paused.

        Call this before any event that arrived during the pause.
        """
        self._progress.handle_pause(by_s)
        self._feed(events.ProcessPaused(by_s))

    # -- calls of ranks

    def ask(self, reply: Reply[Answer], time_left_s: float, **fields: Any) -> int:
        """Handle a rank's request for a quorum. Return the number of the call, to be passed to `end_call`.

        `reply` receives the answer or a refusal within `time_left_s` seconds. `fields` are the fields of
        QuorumRequest except `call` and `deadline_at`.
        """
        within_s = _answer_within_s(time_left_s)
        ask = QuorumRequest(call=next(self._numbers), deadline_at=self._clock() + within_s, **fields)
        return self._submit_call(_Call(ask, reply), within_s)

    def vote(self, reply: Reply[Decision], time_left_s: float, **fields: Any) -> int:
        """Handle a rank's vote, as `ask` handles a request. `fields` are the fields of PendingVote except `call`."""
        vote = PendingVote(call=next(self._numbers), **fields)
        return self._submit_call(_Call(vote, reply), _answer_within_s(time_left_s))

    def end_call(self, call: int) -> None:
        """End a call because its caller has disconnected. Do nothing if it has already been answered."""
        if (ended := self._calls.pop(call, None)) is not None:
            if ended.expiry is not None:
                ended.expiry.cancel()
            self._feed(events.CallEnded(call))

    def report_rank_failure(self, group_rank: int, rank_incarnation: str, reason: str, *, ends_group: bool) -> None:
        """Handle a rank's report that it has failed and will exit. If `ends_group`, the whole group must exit."""
        check_rank(group_rank, self.machine.group.me.group_world_size)
        self._feed(events.RankFailed(group_rank, rank_incarnation, reason, ends_group))

    def drain_for(self, group_rank: int, rank_incarnation: str, reason: str) -> None:
        """Make the group leave the job at a rank's request. Raise WrongState if that process has no open watch."""
        check_rank(group_rank, self.machine.group.me.group_world_size)
        if not self.machine.watches.is_watched(group_rank, rank_incarnation):
            raise WrongState(f"rank {group_rank}: its process is not watched, so it cannot drain the group")
        log.info("%s: the group is draining", reason, extra=event("drain_asked", reason=reason))
        self.drain(reason)

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """Return the address at which a rank serves its state; see `QuorumRequests.checkpoint_address`."""
        return self.machine.requests.checkpoint_address(group_rank, step)

    def check_peer(self, group_rank: int, quorum_id: int, proof: str) -> None:
        """Check that a caller may receive the address at which a rank serves its state.

        Raise NotPermitted if the group's ranks are Agents and `proof` does not prove that the caller is a member of
        quorum `quorum_id`.
        """
        secret = self.machine.secret_of(quorum_id)
        if self.machine.is_proof_required and not is_proven(proof, secret, ADDRESS_WORD, quorum_id, group_rank):
            raise NotPermitted(
                f"quorum_id: only members of its quorum may request {self.machine.group.me.replica_id}'s address for "
                "heals, and the caller has not proved that it is a member"
            )

    def _with_secret(self, assignment: Assignment) -> Assignment:
        return replace(assignment, secret=self.machine.secret_of(assignment.quorum_id))

    def ranks_started(self, group_ranks: Sequence[int] | None) -> None:
        """Record that a supervisor has restarted the lost ranks among `group_ranks`, or all of them if it is None."""
        self._feed(events.RanksStarted(None if group_ranks is None else tuple(group_ranks)))

    # -- watches of ranks

    def open_watch(self, hello: WatchHello, peer: Peer[ToRank], *, is_local: bool) -> int:
        """Open a watch and return its number. Raise InvalidRequest for an unknown rank.

        `peer` sends messages to the rank. `is_local` means that its process runs on this host, in this pid namespace.
        """
        check_rank(hello.group_rank, self.machine.group.me.group_world_size)
        number, watch = next(self._numbers), Watch(hello, peer, is_local, self._clock())
        for older in self._watches.values():
            if older.hello.group_rank == hello.group_rank:
                older.is_newest = False
        self._watches[number] = watch
        self._evidence.add_watch(watch)
        peer.send(WatchOpened())
        self._notices.send_notices(watch)
        if not hello.is_observer:
            self._feed(events.WatchOpened(number, hello.group_rank, hello.rank_incarnation))
        return number

    def receive(self, number: int, message: FromRank | None) -> None:
        """Handle a message on watch `number`, which shows that the rank is alive. None is a message of unknown type."""
        watch = self._watches.get(number)
        if watch is None:
            return
        watch.heard_at = self._clock()
        match message:
            case Vote(number, step, should_commit, quorum_id, wants_next, time_left_s):
                rank = watch.hello.group_rank
                vote = PendingVote(next(self._numbers), rank, step, should_commit, quorum_id, wants_next)
                self._submit_call(_Call(vote, None, watch, number), _answer_within_s(time_left_s))
            case Leaving() if watch.hello.is_observer:
                self._progress.remove_watch(watch)
            case Leaving(step):
                self._feed(events.RankLeaves(number, step))
            case ProgressSample():
                self._progress.add_sample(watch, message)
                if message.healed is not None and message.healed != watch.healed:
                    watch.healed, hello = message.healed, watch.hello
                    self._feed(events.RankHealed(hello.group_rank, hello.rank_incarnation, message.healed))
            case SelfReport():
                self._evidence.take_self_report(watch, message)
            case WatchHello():
                raise InvalidRequest("is only the first message of a watch", field="hello")
            case None:
                pass

    def send_to_rank(self, group_rank: int, message: ToRank) -> bool:
        """Send a message to the Agent of a rank. Return False if that rank has no connected Agent."""
        for watch in self._watches.values():
            if watch.hello.group_rank == group_rank and watch.is_newest and not watch.hello.is_observer:
                watch.peer.send(message)
                return True
        return False

    def end_watch(self, number: int) -> None:
        """Close a watch because its stream or its process has ended. Repeated calls do nothing."""
        watch = self._watches.pop(number, None)
        if watch is None:
            return
        watch.is_open = False
        watch.peer.end()
        self._evidence.drop_watch(watch)
        if not watch.hello.is_observer:  # an observed rank that has not left stays in the view with its last sample
            self._progress.remove_watch(watch)
            self._feed(events.WatchEnded(number))
        for call in [call for call, waiting in self._calls.items() if waiting.watch is watch]:
            self.end_call(call)

    # -- the lighthouse

    def begin_session(self) -> None:
        self._feed(events.SessionOpened())
        if self._preemption is not None:
            self._link.send(self._preemption)

    def handle_message(self, message: ToManager) -> None:
        if isinstance(message, PreemptionNoted):
            self._report(message)
        else:
            self._feed(events.Received(message))

    def end_session(self, *, is_moving: bool = False) -> None:
        self._feed(events.SessionClosed(is_moving))

    # -- shutdown

    def drain(self, reason: str, *, is_revocable: bool = False) -> None:
        """Leave the job after the steps that the ranks may already have begun.

        `cancel_drain` can undo this if `is_revocable`.
        """
        self._feed(events.DrainAsked(reason, is_revocable))

    def cancel_drain(self) -> bool:
        """Cancel a revocable drain. Return False if the group is already leaving, or if its drain is not revocable."""
        self._feed(events.DrainCancelled())
        return not self.machine.group.drains

    # -- preemption

    def report_preemption(self, notice: PreemptionNotice | None) -> None:
        """Send the notice to the lighthouse, now and in each later session. None withdraws an earlier notice."""
        self._preemption = PreemptionReport(notice)
        self._link.send(self._preemption)

    def set_preemption(self, notice: PreemptionNotice | None, *, should_save: bool) -> None:
        """Send the notice to the connected ranks, and to ranks that connect later. None withdraws an earlier notice.

        `should_save` tells the ranks to save a checkpoint before they exit.
        """
        self._notices.set_preemption(PreemptionChanged(notice, should_save))

    def close(self, reason: str) -> None:
        """Refuse all pending and future calls with `reason`, and stop all timers."""
        self._closed = Unreachable(reason)
        self._timer.cancel()
        self._progress.close()
        self._evidence.close()
        self._notices.close()
        for call in list(self._calls):
            self._answer(call, self._closed)

    def kill(self, killed: events.Killed) -> None:
        """Make the ranks' Agents exit with status 1, and pass `killed` to the daemon or its supervisor."""
        for watch in self._watches.values():
            watch.peer.send(KilledMessage(killed.reason))
        self._report(killed)

    # -- waiting

    def _submit_call(self, call: _Call, within_s: float) -> int:
        """Pass a call to the state machine. Refuse the call if it is not answered within `within_s` seconds."""
        number = call.event.call
        if self._closed is not None:
            call.send_answer(self._closed)
            return number
        self._calls[number] = call
        self._feed(call.event)
        if number in self._calls:  # false after a grant, which is answered immediately
            call.expiry = self._timers.call_later(within_s, self._expire, call.event, within_s)
        return number

    def _expire(self, event: QuorumRequest | PendingVote, within_s: float) -> None:
        if isinstance(event, QuorumRequest):
            error = self._no_quorum(within_s)
        else:
            error = DeadlinePassed(f"the other ranks of the group have not voted within {within_s:.3g} s")
        self._answer(event.call, error)
        self._feed(events.CallEnded(event.call, error))

    def _no_quorum(self, within_s: float) -> LighthouseError:
        status = self.status()
        if status.silent and status.is_gathering:
            size = status.me.group_world_size
            what = f"ranks {status.silent} of {size} have not asked for a quorum within {within_s:.3g} s"
            return DeadlinePassed(f"{what}; {describe_missing(status.me, status.missing) or 'all are connected'}")
        if self._link.error:
            return Unreachable(f"lighthouse: {self._link.error}; tried for {within_s:.3g} s")
        return DeadlinePassed(f"the lighthouse gave no quorum within {within_s:.3g} s")

    # -- feed and perform

    def _feed(self, event: events.Event) -> None:
        self._lag.check()
        if self._closed is None:
            self._perform(self.machine.handle(event, self._clock()))

    def _tick(self) -> None:
        self._lag.check()
        self._perform(self.machine.tick(self._clock()))

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.QuorumAnswered(call, assignment, quorum):
                    if not assignment.revoked:  # if it is, other ranks may already be waiting for the next quorum
                        self._notices.end_wait()
                    self._progress.record_assignment(assignment)
                    self._log_quorum(assignment)
                    self._answer(call, (replace(self._with_secret(assignment), world=self._notices.world), quorum))
                case VoteAnswer(call, outcome):
                    if isinstance(outcome, Decision) and log.isEnabledFor(logging.DEBUG):
                        self._log_decision(call, outcome)
                    if isinstance(outcome, Decision) and outcome.next is not None:
                        outcome = Decision(outcome.commit, self._with_secret(outcome.next))
                    self._answer(call, outcome)
                case events.CallRefused(call, error):
                    if isinstance(error, Unrecoverable):
                        log.error("the ranks cannot continue: %s", error, extra=event("unrecoverable"))
                    self._answer(call, error)
                case events.Sent(message):
                    self._link.send(message)
                case events.Pushed(message, watches):
                    _log_pushed(message, watches)
                    for number in watches:
                        if (watch := self._watches.get(number)) is not None:
                            watch.peer.send(message)
                case events.MissingChanged(text):
                    self._notices.set_missing(text)
                case events.WaitChanged(is_waiting):
                    self._notices.set_waiting(is_waiting)
                case events.FailureReported(rank, reason, is_known):
                    if is_known:
                        level = logging.INFO if reason.startswith("KeyboardInterrupt") else logging.ERROR  # Ctrl-C
                        log.log(level, "rank %d failed: %s", rank, reason, extra=event("rank_failed", rank=rank))
                    else:
                        fields = event("unknown_process_failed", rank=rank)
                        log.info("an unknown process reported that rank %d failed: %s", rank, reason, extra=fields)
                case events.RankGivenUp(rank, reason):
                    fields = event("rank_given_up", rank=rank)
                    if effect.is_expected:
                        log.info("%s", reason, extra=fields)
                    else:
                        log.error("lost rank %d: %s", rank, reason, extra=fields)
                    self._report(effect)
                case events.GroupGivenUp():
                    self._report(effect)
                case events.SessionGivenUp(reason):
                    self._link.give_up(reason)
                case events.SilenceChanged(is_silent):
                    if is_silent:
                        self._link.connect_second("it has not answered the last heartbeat")
                    else:
                        self._link.cancel_second()
                case events.Killed(reason):
                    log.error("killed by the lighthouse: %s", reason, extra=event("killed", reason=reason))
                    self.kill(effect)
                case events.WorldChanged(world):
                    self._notices.update_world(world)
                case events.EvidenceWanted(request):
                    self._evidence.collect_evidence(request, self._view_progress)
                case events.GroupLeft(reason):
                    log.info("left the job: %s", reason, extra=event("left"))
                    self._report(effect)
        self._timer.set(self.machine.deadline())

    def _view_progress(self) -> GroupView:
        self._lag.check()
        return self._progress.view(self._clock())

    def _log_quorum(self, assignment: Assignment) -> None:
        """Log a quorum when its first rank receives it. `lighthouse check-history` reads this log line."""
        quorum_id, step, size = assignment.quorum_id, assignment.max_step, assignment.replica_world_size
        if quorum_id != self._logged_quorum_id:
            self._logged_quorum_id = quorum_id
            fields = event("quorum_received", quorum_id=quorum_id, step=step, participants=size)
            log.info("received quorum %d of %d groups: step %d", quorum_id, size, step, extra=fields)

    def _log_decision(self, call: int, decision: Decision) -> None:
        vote = self._calls[call].event if call in self._calls else None
        if isinstance(vote, PendingVote) and vote.quorum_id is not None:
            said, answer = "yes" if vote.vote else "no", "commit" if decision.commit else "discard"
            fields = event("decision", rank=vote.group_rank, quorum_id=vote.quorum_id, step=vote.step, answer=answer)
            text = "step %d of quorum %d: rank %d votes %s, answer: %s"
            log.debug(text, vote.step, vote.quorum_id, vote.group_rank, said, answer, extra=fields)

    def _answer(self, call: int, value: object) -> None:
        if (answered := self._calls.pop(call, None)) is not None:
            answered.send_answer(value)


def _log_pushed(message: ToRank, watches: tuple[int, ...]) -> None:
    match message:
        case Revoked(quorum_id, reason, lost):
            fields = event("quorum_revoked", quorum_id=quorum_id, lost=lost or None)
            why = reason if not lost or reason.startswith(lost) else f"{lost}: {reason}"
            log.info("quorum %d revoked: %s", quorum_id, why, extra=fields)
        case RankGone(group_rank, reason) if watches:
            log.error("ending the other ranks: %s", reason, extra=event("rank_gone", rank=group_rank))
        case Released():
            log.info("the leaving ranks may exit now", extra=event("ranks_released"))
        case _:
            pass


def _answer_within_s(time_left_s: float) -> float:
    """Return within how many seconds to answer, so that the answer arrives before the deadline in `time_left_s`."""
    return time_left_s - answer_margin_s(time_left_s) / 2
