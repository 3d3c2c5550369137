"""State machine of one replica group's manager, between the ranks and the lighthouse. This module does no I/O.

`ReplicaGroup` (records.py) holds the state. presence.py, requests.py, votes.py and session.py hold the rules for its
parts, and append their effects to `ReplicaGroup.effects`. This module combines them.

This module uses three terms. A *standing quorum* is one under which the group may do many steps. A *grant* is the
manager's permission for its ranks to enter the next step of that quorum without asking the lighthouse. The *lease* is
the time after the last acknowledged heartbeat during which the manager may grant.

1. When a rank requests a quorum, the manager grants it a step under the standing quorum, keeps the request until the
   lighthouse's next message or the group's next vote, or gathers it for a join. Once the requests of all ranks are
   gathered, the group joins: it requests the next quorum from the lighthouse. If a rank withdraws a gathered request,
   the join is withdrawn, too.
2. Ranks enter the first step of a standing quorum only under a valid lease.
3. The next step is granted only after all ranks have committed the previous one. If all ranks ask for this in their
   votes, the answers to the votes carry the grant. A discarded step ends the quorum for this group.
4. The loss of a rank also ends the quorum, and the other ranks receive `Revoked`. If the rank does not return, they
   receive `RankGone`, and their requests are refused, because their collectives would wait for it forever.
5. A rank that closes its Agent normally after its last committed step exits only when it receives `Released`. The
   manager sends this once the quorum is over, because peers may still be reading the rank's data, and the group's other
   ranks have left or requested the next step.
6. Changes for which the lighthouse is waiting, such as the loss of a rank or the end of a quorum, are sent immediately.
7. A draining group completes the steps that it has been granted, and leaves instead of joining again.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Decision, Participant, Quorum, World
from lighthouse_protocol.messages.preemption import PreemptionNoted
from lighthouse_protocol.messages.session import HoldState, QuorumPhase, RankGone, Released, Revoked
from lighthouse_protocol.refusals import Drained, LighthouseError, Superseded, WrongState
from manager.group import events
from manager.group.counts import GroupStatus, StepCounts, describe_missing
from manager.group.events import PendingVote, QuorumRequest
from manager.group.presence import RankPresence
from manager.group.records import ReplicaGroup
from manager.group.requests import LEASE_SHARE, QuorumRequests, Verdict, decide_request, unknown_rank_error
from manager.group.session import ProgressReporter, SessionMachine
from manager.group.votes import Votes

SECRETS_KEPT = 4  # a peer may still send a request under the previous quorum


class GroupMachine:
    """State machine of a group's manager.

    Args:
        me: This group as a participant. Each join sets the fields that change.
        manager_incarnation: Identifier of this manager process. It becomes part of the group's incarnation.
        encode_handles: Function that encodes the reconfigure handles in the requests of torchft's ranks. The
            lighthouse relays the result to the peers.
        rank_timeout_s: Seconds after which a rank without a watch and without a call is lost, or None for no limit.
        progress: Supplies the progress of the ranks for heartbeats.
        secret: Random string by which the lighthouse recognizes this manager when it opens another session.

    All times (`now`) are readings of the caller's monotonic clock, in seconds.
    """

    def __init__(
        self,
        me: Participant,
        manager_incarnation: str,
        encode_handles: Callable[[tuple[str, ...]], bytes] | None = None,
        rank_timeout_s: float | None = None,
        progress: ProgressReporter | None = None,
        secret: str = "",
    ) -> None:
        self._manager_incarnation = manager_incarnation
        self._encode_handles = encode_handles
        self.group = ReplicaGroup(me)
        self.requests = QuorumRequests(self.group)
        self.votes = Votes(self.group)
        self.watches = RankPresence(self.group, rank_timeout_s)
        self.counts = StepCounts(self.group)
        self.session = SessionMachine(progress, secret)
        self._unopened: session.JoinAccepted | None = None  # quorum received, but not yet passed on to the ranks
        self._secrets: dict[int, str] = {}  # secrets of the last quorums, by quorum_id
        self._draining = ""  # reason of the drain
        self._is_drain_revocable = True  # all requests to drain have been revocable so far
        self._why_over = ""  # why the lighthouse does not admit the group again
        self._has_left = self._has_ended = False
        self._session_end = ""  # how the session ended after the group left
        self._goodbye_by: float | None = None  # when the group stops waiting for the answer to its leave
        self._awaited = ""  # what the lighthouse is waiting for
        self._report = session.GroupReport()
        self._reported_facts: tuple[object, ...] = ()
        self._missing: Set[int] = frozenset(range(me.group_world_size))
        self._is_waiting = False

    @property
    def incarnation(self) -> str:
        return f"{self._manager_incarnation}.{self.group.incarnation}"

    def group_report(self) -> session.GroupReport:
        """Return the group's report for heartbeats. It is the same object until its content changes."""
        standing = self.group.standing
        held = standing and (standing.quorum.quorum_id, standing.mode, standing.granted, standing.wants_next)
        down, missing = self.watches.absence()
        facts = held, self.group.drains, down, missing, self.counts.totals
        if facts != self._reported_facts:
            self._reported_facts = facts
            self._report = session.GroupReport(held and session.HeldQuorum(*held), *facts[1:])
        return self._report

    @property
    def held(self) -> session.HeldQuorum | None:
        standing = self.group.standing
        return None if standing is None else standing.held

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks with a waiting request."""
        return tuple([rank.group_rank for rank in self.group.ranks if rank.pending is not None])

    def status(self) -> GroupStatus:
        held, (_, missing) = self.held, self.watches.absence()
        return GroupStatus(
            me=self.group.me,
            incarnation=self.incarnation,
            held=held,
            quorum_id=self.group.quorum_id,
            step=max(self.group.step, held.granted if held is not None else 0),
            is_joined=self.session.is_joining,
            is_gathering=bool(self.group.pending(is_gathering=True)),
            is_voting=self.votes.is_voting,
            waiting=self.waiting,
            missing=missing,
            awaited=self._awaited,
            commits=self.counts.commits,
            discards=self.counts.discards,
            grants=self.group.grants,
        )

    def secret_of(self, quorum_id: int) -> str:
        """Return the shared secret of a quorum's members, or an empty string if it is unknown."""
        return self._secrets.get(quorum_id, "")

    @property
    def is_proof_required(self) -> bool:
        """True if a caller must prove that it is a member of the quorum before it receives a rank's address.

        This applies if all ranks are Agents. Clients that call the RPCs without an Agent have no quorum secret.
        """
        return bool(self._secrets) and self.watches.are_agents

    def handle(self, event: events.Event, now: float) -> Sequence[events.Effect]:
        has_timeout = self.watches.rank_timeout_s is not None
        if has_timeout:
            self._note_calls(now)
        self.group.effects = []
        self._dispatch(event, now)
        if has_timeout:
            self._note_calls(now)
        return self._finish(now)

    def tick(self, now: float) -> Sequence[events.Effect]:
        if self.watches.rank_timeout_s is not None:
            self._note_calls(now)
        self.group.effects = []
        if (expires_at := self.watches.deadline()) is not None and now >= expires_at:
            self._expire_ranks(now)
        if self._goodbye_by is not None and now >= self._goodbye_by and not self._session_end:
            self._session_end = f"the lighthouse has not answered for {self.session.lease_s:g} s"
        if self.session.is_given_up(now):
            self.session.close_session()
            reason = f"the lighthouse has not answered a heartbeat for {self.session.lease_s:g} s"
            self._add(events.SessionGivenUp(reason))
            self._note_changes(self.group_report().missing)
            return self.group.effects
        return self._finish(now)

    def deadline(self) -> float | None:
        """Return when to call `tick` next, or None if no timer is needed."""
        deadlines = self.session.deadline(), self.watches.deadline(), None if self._session_end else self._goodbye_by
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def _dispatch(self, event: events.Event, now: float) -> None:
        match event:
            case events.SessionOpened():
                if not self._has_left:
                    self._send(self.session.open_session(self._participant(), self.group_report(), now))
            case events.SessionClosed(is_moving):
                self.session.close_session()
                self._awaited = ""
                self._unopened = None  # the next session requests it again
                if self._has_left:
                    self._session_end = self._session_end or "its session has ended"
                if self.group.drains and not is_moving:
                    self._leave_if_idle(now)
            case events.Received(message):
                self._receive(message, now)
            case events.ProcessPaused(by_s):
                self.watches.postpone_timeouts(by_s)
            case events.DrainAsked(reason, is_revocable):
                self._draining, self.group.drains = self._draining or reason, True
                self._is_drain_revocable &= is_revocable
                self._leave_if_idle(now)
            case events.DrainCancelled():
                # While a join is pending, the lighthouse may already have refused it because of the drain.
                is_leaving = self._has_left or self.session.is_joining
                if self._is_drain_revocable and not is_leaving and not any(r.is_dismissed for r in self.group.ranks):
                    self._draining, self.group.drains = "", False
            case _:
                self._handle_rank(event, now)

    def _finish(self, now: float) -> list[events.Effect]:
        """Finish handling an event: add the effects that follow from the changed records, and return all effects."""
        self._release()
        if self.group.drains and not self.watches.has_ranks:
            self._leave(now)
        report = self.group_report()
        if messages := self.session.tick(report, now):
            self._send(messages)
        if (is_silent := self.session.silence_change(now)) is not None:
            self._add(events.SilenceChanged(is_silent))
        if self._session_end and not self._has_ended:
            # The remaining ranks must first learn that the group is leaving.
            self._has_ended = all(self.group.ranks[rank].is_dismissed for rank in self.watches.staying_ranks)
            if self._has_ended:
                self._release()
                self._add(events.GroupLeft(self._why_over or self._session_end))
        self._note_changes(report.missing)
        return self.group.effects

    # -- the ranks

    def _handle_rank(self, event: events.RankEvent, now: float) -> None:
        match event:
            case QuorumRequest() | PendingVote() if not 0 <= event.group_rank < self.group.size:
                self.group.refuse(event.call, unknown_rank_error(event.group_rank, self.group.size))
            case QuorumRequest() if self.watches.has_closed_watch(event.group_rank, event.rank_incarnation):
                # The process has exited, or can still open its watch again and then repeat the request.
                what = f"rank {event.group_rank}: its watch is closed; open it again"
                self.group.refuse(event.call, WrongState(what))
            case QuorumRequest():
                self.watches.record_request(event.group_rank)
                self.watches.restart_timeout((event.group_rank,), now)
                self._decide_step(self.votes.note_request(event), now)
                self._answer_request(event, now)
            case PendingVote():
                self._count_vote(event, now)
            case events.CallEnded(call, error):
                self._end_call(call, error)
            case events.WatchOpened(watch, group_rank, rank_incarnation):
                if self.watches.open_watch(watch, group_rank, rank_incarnation):
                    self._handle_loss(group_rank, now, successor=rank_incarnation)
            case events.WatchEnded(watch):
                rank = self.watches.end_watch(watch, now)
                if rank is not None:
                    self._handle_loss(rank, now)
            case events.RankLeaves(watch, step):
                mates = self.watches.staying_ranks - set(self.waiting) if step is not None else set[int]()
                if self.watches.begin_leaving(watch, mates):
                    self.requests.leave(step)
            case events.RanksStarted(group_ranks):
                self.watches.record_restart(group_ranks)
            case events.RankHealed(group_rank, rank_incarnation, totals):
                self.counts.record_heals(group_rank, rank_incarnation, totals)
            case events.RankFailed(group_rank, rank_incarnation, reason, ends_group):
                is_known = self.watches.record_rank_failure(group_rank, rank_incarnation, reason, now)
                self._add(events.FailureReported(group_rank, reason, is_known))
                if not is_known:
                    return
                self._handle_loss(group_rank, now)
                if ends_group:
                    self._end_mates(group_rank, self.watches.loss_of(group_rank).mates, reason)
                    self._add(events.GroupGivenUp(reason))

    def _release(self) -> None:
        """Release the leaving ranks whose data no other rank in the group needs any more.

        Do nothing while the group is leaving its quorum, because other groups may still be reading that data.
        """
        standing = self.group.standing
        is_leaving = standing is not None and standing.mode is HoldState.LEAVING and not self._has_ended
        if not is_leaving and (released := self.watches.release()):
            self._add(events.Pushed(Released(), released))

    def _answer_request(self, request: QuorumRequest, now: float) -> None:
        """Grant, keep or refuse a rank's request for a step, or join the next quorum with it."""
        rank = self.group.ranks[request.group_rank]
        superseded = Superseded(f"rank {request.group_rank} has sent a newer request")
        if rank.pending is not None and not rank.pending.is_gathering:
            self._refuse(request.group_rank, superseded)
        decision = decide_request(self.group, request, now)
        standing, mode = self.group.standing, decision.mode
        if standing is not None and mode is not None:
            standing.mode = mode
        match decision.verdict:
            case Verdict.GRANT | Verdict.REPEAT as verdict:
                assignment = self.requests.grant(request, is_first=verdict is Verdict.GRANT)
                if verdict is Verdict.GRANT:
                    self._open_step(now)
                self._add(events.QuorumAnswered(request.call, assignment, None))
                return
            case Verdict.WAIT:
                self.group.wait(request, is_gathering=False)
                return
            case Verdict.LEAVE:
                self._dismiss(request, self._drain_error())
                self._leave(now)
                return
            case _:
                pass
        if mode is HoldState.REVOKED:
            self._push_revoked(f"rank {request.group_rank} cannot continue under it")
        error = decision.error
        if decision.verdict is Verdict.REFUSE and error is not None:
            self.group.refuse(request.call, error)
            return
        self._refuse(request.group_rank, superseded)
        self.requests.gather(request)
        if error is not None:
            self._refuse_all(error)
        elif decision.verdict is Verdict.JOIN:
            asks = sorted(self.group.pending(is_gathering=True), key=lambda ask: ask.group_rank)
            me = self.requests.join(self._participant())
            if self._encode_handles is not None:
                me = replace(me, wire=self._encode_handles(tuple(ask.handle for ask in asks)))
            self._send(self.session.join(me, min(ask.deadline_at for ask in asks), now))

    def _open_step(self, now: float) -> None:
        """Open voting on the step that the ranks have just been allowed to start."""
        standing = self.group.standing
        assert standing is not None
        self.counts.begin_step(now, has_healing=self.requests.is_catching_up)
        self._open_attempt(standing.quorum.quorum_id, standing.granted)

    def _open_attempt(self, quorum_id: int, step: int) -> None:
        for rank in self.group.ranks:
            rank.wants_next = False
        self.votes.open(quorum_id, step)

    def _enter_quorum(self, quorum: Quorum, now: float, *, stands: bool) -> None:
        """Start the first step of the quorum that answers the group's join, and answer the ranks' requests.

        `stands` is True for a standing quorum, under which the group may do many steps.
        """
        answers = self.requests.enter_quorum(quorum, stands=stands)
        if isinstance(answers, LighthouseError):
            self._refuse_all(answers)
            return
        mine = answers[0].assignment
        self.counts.begin_step(now, has_healing=mine.has_healing or mine.catches_up)
        self._open_attempt(quorum.quorum_id, self.group.max_step)
        self.group.effects += answers

    def _decide_again(self, now: float) -> None:
        """Decide again on the waiting requests, except on those gathered for a join, which the next quorum answers."""
        waiting = self.group.pending(is_gathering=False)
        for request in waiting:
            self.group.ranks[request.group_rank].pending = None
        for request in waiting:
            self._answer_request(request, now)

    def _count_vote(self, vote: PendingVote, now: float) -> None:
        self.watches.restart_timeout((vote.group_rank,), now)
        self.watches.remove_mate(vote.group_rank)
        was_last = self.requests.record_vote(vote)
        self._decide_step(self.votes.infer_decision(vote), now)
        self._decide_step(self.votes.count_vote(vote), now)
        if self.group.attempt is not None and self.group.attempt.decision is None:
            for request in self.group.pending(is_gathering=True):
                self._decide_step(self.votes.note_request(request), now)
            for loss in self.watches.losses:
                if loss.is_given_up:
                    self.votes.give_up_rank(loss.group_rank, loss.reason)
        if was_last:
            self._decide_again(now)

    def _decide_step(self, commit: bool | None, now: float, rank_lost: str = "") -> None:
        """Commit or discard the current step, and answer its votes. Do nothing if `commit` is None (undecided).

        If the loss of a rank caused a discard, `rank_lost` describes it.
        """
        attempt = self.group.attempt
        if commit is None or attempt is None:
            return
        votes = self.votes.decide(commit)
        has_grant = False
        if commit:
            self.counts.count_step(now)
            self.requests.record_committed_step(attempt.quorum_id, attempt.step)
            wants = all(rank.wants_next for rank in self.group.ranks)
            has_grant = wants and not self.group.drains and self.requests.grant_next(now)
            if has_grant:
                self._open_step(now)
        else:
            self.counts.count_discard(attempt.quorum_id, now, is_rank_lost=bool(rank_lost))
            if self.requests.should_end_on_discard(attempt.quorum_id):
                self._give_up_quorum(rank_lost or "a step was discarded", now)
        for vote in votes:
            grant = self.requests.assignment(vote.group_rank, True) if has_grant else None
            self._add(session.VoteAnswer(vote.call, Decision(commit, grant)))

    def _give_up_quorum(self, reason: str, now: float) -> None:
        """End this group's part in the standing quorum, and make its ranks abort unfinished collectives."""
        if self.requests.give_up():
            self._push_revoked(reason)
            self._decide_again(now)

    def _push_revoked(self, reason: str, lost: str = "") -> None:
        if (standing := self.group.standing) is not None:
            self._add(events.Pushed(Revoked(standing.quorum.quorum_id, reason, lost), self.watches.staying_watches()))

    # -- the ends of ranks and calls

    def _note_calls(self, now: float) -> None:
        """Restart the rank timeout of the ranks that have a call in progress."""
        open_calls = [r.group_rank for r in self.group.ranks if r.pending is not None or r.vote is not None]
        self.watches.restart_timeout(open_calls, now)

    def _expire_ranks(self, now: float) -> None:
        """Handle ranks that have exceeded the rank timeout, and lost ranks that have not returned in time."""
        for rank in self.watches.expire_ranks(now):
            self._handle_loss(rank, now)
        for loss in self.watches.give_up_ranks(now):
            where = ", was restarted and has not connected yet" if loss.is_restarted else " and has not reconnected"
            reason = loss.reason + where
            self._end_mates(loss.group_rank, loss.mates, reason)
            self._add(events.RankGivenUp(loss.group_rank, reason, loss.lost_at, loss.has_left, loss.is_restarted))

    def _handle_loss(self, group_rank: int, now: float, successor: str = "") -> None:
        """Refuse a lost process's request, discard the step unless the rank has voted on it, and end the quorum.

        `successor` is the rank incarnation of the process that has already replaced the lost one, or empty if there is
        none. Its own request is kept.
        """
        waiting = self.group.ranks[group_rank].pending
        reason = f"rank {group_rank} has restarted" if successor else self.watches.loss_of(group_rank).reason
        if not successor or (waiting is not None and waiting.request.rank_incarnation != successor):
            self._refuse(group_rank, WrongState(reason))
        self._decide_step(self.votes.note_loss(group_rank), now, reason)
        self._give_up_quorum(reason, now)

    def _end_mates(self, group_rank: int, mates: frozenset[str], reason: str) -> None:
        """Send `RankGone` to the processes in `mates`, and refuse their requests.

        `group_rank` is the lost rank. `mates` are the rank incarnations of the other ranks at the time of its loss.
        """
        self._add(events.Pushed(RankGone(group_rank, reason), self.watches.watches_of(mates)))
        self.votes.give_up_rank(group_rank, self.watches.loss_of(group_rank).reason)
        for request in (*self.group.pending(is_gathering=False), *self.group.pending(is_gathering=True)):
            if request.rank_incarnation in mates:
                self._refuse(request.group_rank, WrongState(reason))

    def _refuse(self, group_rank: int, error: LighthouseError) -> None:
        """Refuse a rank's waiting request, if any. If the request was gathered for a join, withdraw the join."""
        rank = self.group.ranks[group_rank]
        if rank.pending is not None:
            pending, rank.pending = rank.pending, None
            if pending.is_gathering:
                self._send(self.session.withdraw())
            self.group.refuse(pending.request.call, error)

    def _refuse_all(self, error: LighthouseError) -> None:
        """Refuse every request that was gathered for a join, and withdraw the join."""
        self._send(self.session.withdraw())
        for request in self.group.pending(is_gathering=True):
            self.group.ranks[request.group_rank].pending = None
            self._dismiss(request, error)

    def _dismiss(self, request: QuorumRequest, error: LighthouseError) -> None:
        if isinstance(error, Drained):
            self.group.ranks[request.group_rank].is_dismissed = True
        self.group.refuse(request.call, error)

    def _end_call(self, call: int, error: LighthouseError | None) -> None:
        """Drop the request or vote of a call that has ended, except a vote that names its quorum.

        Withdraw the join if the request was part of one. `error` is the error of a call that reached its deadline, or
        None if the caller disconnected. If it is set and a join was withdrawn, refuse the other requests with it, too.
        """
        was_joined = self.session.is_joining
        for rank in self.group.ranks:
            if rank.pending is not None and rank.pending.request.call == call:
                if rank.pending.is_gathering:
                    self._send(self.session.withdraw())
                rank.pending = None
        self.votes.withdraw(call)
        if error is not None and was_joined and not self.session.is_joining:
            self._refuse_all(error)

    # -- the lighthouse

    def _receive(self, message: session.ToManager, now: float) -> None:
        match message:
            case session.Welcome(_, _, order):
                self.session.handle_welcome(message, now)
                if order is not None:
                    self._apply_order(order, now)
            case session.HeartbeatAck(_, _, order):
                sent_at = self.session.handle_ack(message, now)
                if order is not None:
                    self._apply_order(order, now)
                if sent_at is not None:
                    self.requests.renew_lease(sent_at + LEASE_SHARE * self.session.lease_s)
                if self._unopened is not None:
                    self._open(now)
                self._decide_again(now)
            case session.JoinAccepted(join) | session.QuorumChanged(join):
                if not self.session.is_waiting(join):
                    return
                self._unopened = self.session.full_answer(message)
                if self._unopened is not None:
                    self._open(now)
                else:
                    self._send(self.session.request_full(now))
            case session.JoinRejected(join, error):
                is_ours = self.session.end_join(join) if join else self.session.is_joining
                if is_ours and isinstance(error, Drained) and not self.group.drains:  # the job has ended for this group
                    self._draining, self._why_over, self.group.drains = str(error), str(error), True
                    self._is_drain_revocable = False
                if is_ours:
                    self._refuse_all(error)
                if not join and isinstance(error, WrongState):  # the group is not admitted
                    self._give_up_quorum(str(error), now)
                if is_ours and self.group.drains:
                    self._leave(now)
            case session.QuorumOrder():
                self._apply_order(message, now)
            case session.DrainRequest(reason):
                self._dispatch(events.DrainAsked(reason or "the lighthouse was asked to drain it"), now)
            case session.KillRequest(reason, behind):
                self._add(events.Killed(reason, behind))
            case World():
                self._awaited = message.waiting_for
                self._add(events.WorldChanged(replace(message, group_world_size=self.group.size)))
            case session.EvidenceRequest():
                self._add(events.EvidenceWanted(message))
            case session.FaultOrder() | session.FaultCancelled():
                pass  # carried out by FaultInjector
            case session.Goodbye(reason):
                self._session_end = reason if self._has_left else ""
            case PreemptionNoted():
                pass  # handled by the driver

    def _apply_order(self, order: session.QuorumOrder, now: float) -> None:
        is_revoked = order.phase is QuorumPhase.REVOKED
        if is_revoked:
            self.counts.record_revoke(order.quorum_id, is_group_lost=bool(order.lost))
        if self.requests.apply_order(order):
            self._push_revoked(order.reason, order.lost)
        self._decide_again(now)
        accepted = self._unopened
        if accepted is None or not is_revoked or order.quorum_id != accepted.quorum.quorum_id:
            return
        self._unopened = None
        if self.session.end_join(accepted.join):
            self._refuse_all(WrongState(f"quorum {order.quorum_id} was revoked: {order.reason}; retry"))

    def _open(self, now: float) -> None:
        """Start the first step of the received quorum. For a standing quorum, do nothing until the lease is valid."""
        accepted = self._unopened
        if accepted is None or (accepted.stands and now >= self.group.renewed_until):
            return
        self._unopened = None
        if not self.session.end_join(accepted.join):  # the join was withdrawn in the meantime
            return
        self._secrets[accepted.quorum.quorum_id] = accepted.secret
        for older in sorted(self._secrets)[:-SECRETS_KEPT]:
            del self._secrets[older]
        self._enter_quorum(accepted.quorum, now, stands=accepted.stands)

    def _participant(self) -> Participant:
        return replace(
            self.group.me,
            incarnation=self.incarnation,
            step=self.group.step,
            seen_quorum_id=self.group.quorum_id,
            watched=self.watches.is_complete,
        )

    def _note_changes(self, missing: Set[int]) -> None:
        """Report changes in the set of missing ranks, and when the ranks' wait for a quorum begins or ends."""
        is_waiting = False
        for rank in self.group.ranks:
            is_waiting |= rank.pending is not None
        if missing != self._missing:
            self._missing = missing
            self._add(events.MissingChanged(describe_missing(self.group.me, missing)))
        # An answer with a revoked assignment does not end the wait.
        if is_waiting and (
            not self._is_waiting
            or any(isinstance(e, events.QuorumAnswered) and not e.assignment.revoked for e in self.group.effects)
        ):
            self._add(events.WaitChanged(True))
        elif self._is_waiting and not is_waiting:
            self._add(events.WaitChanged(False))
        self._is_waiting = is_waiting

    # -- leaving

    def _drain_error(self) -> Drained:
        return Drained(f"{self.group.me.replica_id} leaves: {self._draining}")

    def _leave_if_idle(self, now: float) -> None:
        """Leave if the group has no ranks or is waiting for a quorum, because it then has no step to finish.

        If the lighthouse already has the group's join, wait for the answer: either a refusal because of the drain, or a
        quorum, whose steps the group completes before it leaves.
        """
        if self.session.is_joining and self.session.is_open:
            return
        if self.group.pending(is_gathering=True) or not self.watches.has_ranks:
            self._leave(now)

    def _leave(self, now: float) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._refuse_all(self._drain_error())
        if not self.session.is_open:
            self._session_end = "it had no session with the lighthouse"
            return
        self._send(self.session.leave(self._draining))
        self.session.close_session()
        self._goodbye_by = now + self.session.lease_s

    # -- effects

    def _add(self, effect: events.Effect) -> None:
        self.group.effects.append(effect)

    def _send(self, messages: Sequence[session.ToLighthouse]) -> None:
        self.group.effects += map(events.Sent, messages)
