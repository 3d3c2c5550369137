"""State machine of one replica group's manager, between the ranks and the lighthouse. No I/O.

`ReplicaGroup` (records.py) holds the facts, and presence.py, requests.py, votes.py and session.py the rules of their
parts. This module combines them:

1. A rank's request for a quorum is granted under the standing quorum, waits, or gathers. When all ranks have asked, the
   group joins. If a request is withdrawn, so is the join.
2. Ranks enter the first step of a quorum only under a valid lease.
3. The next grant requires a commit by all ranks. If all ranks want it, the answers to their votes carry that grant. A
   discard ends the quorum for this group.
4. The loss of a rank ends the quorum, too, and the other ranks receive `Revoked`. If the rank does not return, they
   receive `RankGone`, and their requests are refused, because their collectives would wait for it forever.
5. A rank that leaves in good order, with its last step committed, stays until the quorum is over, because its peers may
   still read its data. It also waits until the other ranks of the group leave or request the next step. Then it
   receives `Released`.
6. Facts for which the lighthouse waits (the end of a quorum, the loss of a rank) are sent at once.
7. A draining group does the steps that it has been granted, and leaves when it would join.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant, Quorum, World
from lighthouse_protocol.messages.session import (
    LEFT,
    RESTARTING,
    STARTING,
    QuorumPhase,
    RankGone,
    Released,
    Revoked,
)
from lighthouse_protocol.refusals import Drained, LighthouseError, WrongState
from manager.group import events
from manager.group import requests as gather
from manager.group import votes as commit
from manager.group.counts import GroupStatus, StepCounts, say_missing
from manager.group.presence import RankPresence
from manager.group.records import LostRank, PendingVote, QuorumRequest, ReplicaGroup
from manager.group.requests import LEASE_SHARE, GrantMachine, Join, Wait, no_such_rank, superseded
from manager.group.session import ProgressReporter, SessionMachine

SECRETS_KEPT = 4  # a peer may still send a request under the previous quorum


class GroupMachine:
    """State machine of a group's manager.

    Args:
        me: This group as a participant. The fields that change with each join are filled in later.
        life: Identifies this start of the manager.
        show_handles: Encodes the handles of torchft's ranks, which are relayed to the peers.
        rank_timeout_s: As in RankPresence.
        progress: As in SessionMachine.
        secret: As in SessionMachine.

    Times (`now`) are the caller's monotonic clock in seconds.
    """

    def __init__(
        self,
        me: Participant,
        life: str,
        show_handles: Callable[[tuple[str, ...]], bytes] | None = None,
        rank_timeout_s: float | None = None,
        progress: ProgressReporter | None = None,
        secret: str = "",
    ) -> None:
        self.me = me
        self._life = life
        self._show_handles = show_handles
        self._size = me.group_world_size
        self.group = ReplicaGroup(me.wire_id, me.group_world_size)
        self.gather = gather.GatherMachine(self.group)
        self.commit = commit.CommitMachine(self.group)
        self.grants = GrantMachine(self.group)
        self.watches = RankPresence(self.group, rank_timeout_s)
        self.counts = StepCounts(self.group)
        self.session = SessionMachine(self.report, progress, secret)
        self.drains = False
        self._unopened: session.JoinAccepted | None = None  # received, but the ranks have not entered it yet
        self._secrets: dict[int, str] = {}  # secrets of the last quorums, by quorum_id
        self._draining = ""  # reason of the drain
        self._why_over = ""  # reason of the lighthouse's refusal to let the group join again
        self._has_left = self._has_ended = False
        self._let_go = ""  # how the session ended after the group left
        self._awaited = ""  # reason for the wait, from the lighthouse
        self._missing = self.group.missing
        self._is_waiting = False

    @property
    def incarnation(self) -> str:
        return f"{self._life}.{self.gather.incarnation}"

    def report(self) -> session.GroupReport:
        return session.GroupReport(self.held, self.drains, self.down, self.group.missing, self.counts.told)

    @property
    def held(self) -> session.HeldQuorum | None:
        return self.grants.held

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks with a waiting request."""
        return tuple(rank.group_rank for rank in self.group.ranks if rank.pending is not None)

    @property
    def is_waiting(self) -> bool:
        return any(rank.pending is not None for rank in self.group.ranks)

    @property
    def down(self) -> str:
        """Why the group cannot take part at present; empty if all its ranks are present."""
        if self.grants.is_leaving:
            return LEFT
        if losses := self.watches.losses:
            return RESTARTING if all(loss.is_restarted for loss in losses) else losses[0].reason
        return STARTING if self.watches.is_starting else ""

    @property
    def unaware(self) -> set[int]:
        """The remaining ranks that have not been notified yet that the group leaves."""
        return {rank for rank in self.watches.staying_ranks if not self.group.ranks[rank].is_dismissed}

    def status(self) -> GroupStatus:
        gathered, commit, held = self.gather, self.commit, self.held
        return GroupStatus(
            me=self.me,
            incarnation=self.incarnation,
            held=held,
            quorum_id=gathered.quorum_id,
            step=max(gathered.step, held.granted if held is not None else 0),
            is_joined=gathered.is_joined,
            is_gathering=bool(gathered.asks),
            is_voting=commit.is_voting,
            waiting=self.waiting,
            missing=self.group.missing,
            awaited=self._awaited,
            commits=self.counts.commits,
            discards=self.counts.discards,
            grants=self.grants.given,
        )

    def secret_of(self, quorum_id: int) -> str:
        """Return the shared secret of a quorum's members, or an empty string if it is unknown."""
        return self._secrets.get(quorum_id, "")

    @property
    def proves_itself(self) -> bool:
        """Return whether the ranks are Agents, which serve their states only to members of their quorum."""
        return bool(self._secrets) and self.watches.is_complete

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        return self.gather.checkpoint_address(group_rank, step)

    def handle(self, event: events.Event, now: float) -> Sequence[events.Effect]:
        self._note_calls(now)
        effects = self._dispatch(event, now)
        self._note_calls(now)
        effects += self._release() + self._leave_if_over(now)
        effects += self._send(self.session.tick(now)) + self._listen(now) + self._end()
        return effects + self._note_changes(effects)

    def tick(self, now: float) -> Sequence[events.Effect]:
        self._note_calls(now)
        effects = self._expire_ranks(now)
        if self.session.is_given_up(now):
            self.session.closed()
            effects.append(
                events.SessionGivenUp(f"the lighthouse has answered no heartbeat for {self.session.lease_s:g} s")
            )
        else:
            effects += self._send(self.session.tick(now)) + self._listen(now)
        return effects + self._note_changes(effects)

    def deadline(self) -> float | None:
        """Return when to call `tick` next."""
        deadlines = (self.session.deadline(), self.watches.deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _dispatch(self, event: events.Event, now: float) -> list[events.Effect]:
        match event:
            case events.SessionOpened():
                return [] if self._has_left else self._send(self.session.opened(self._participant(), now))
            case events.SessionClosed():
                self.session.closed()
                self._awaited = ""
                self._unopened = None  # asked for again on the next session
                if self._has_left:
                    self._let_go = self._let_go or "its session has ended"
                return self._leave_if_idle(now) if self.drains else []
            case events.Received(message):
                return self._receive(message, now)
            case events.WasLate(by_s):
                self.watches.shift(by_s)
                return []
            case events.DrainAsked(reason):
                self._draining, self.drains = self._draining or reason, True
                return self._leave_if_idle(now)
            case _:
                return self._handle_rank(event, now)

    # -- the ranks

    def _handle_rank(self, event: events.RankEvent, now: float) -> list[events.Effect]:
        match event:
            case QuorumRequest() | PendingVote() if not 0 <= event.group_rank < self._size:
                return [events.CallRefused(event.call, no_such_rank(event.group_rank, self._size))]
            case QuorumRequest():
                self.watches.asked(event.group_rank)
                self.watches.heard((event.group_rank,), now)
                return self._perform_commit(self._note_request(event), now) + self._ask(event, now)
            case PendingVote():
                self.watches.heard((event.group_rank,), now)
                self.watches.moves_on(event.group_rank)
                self.group.ranks[event.group_rank].wants_next = event.wants_next
                was_last = self.grants.voted(event.group_rank, event.quorum_id, event.step)
                effects = self._perform_commit(self.commit.vote(event), now)
                for ask in self.gather.asks:
                    effects += self._perform_commit(self._note_request(ask), now)
                effects += self._miss(self.watches.missed)
                return effects + (self._decide_again(now) if was_last else [])
            case events.CallEnded(call):
                return self._end_call(call, now)
            case events.CallExpired(call, error):
                return self._expire_call(call, error, now)
            case events.WatchOpened(watch, group_rank, rank_incarnation):
                is_other = self.watches.opened(watch, group_rank, rank_incarnation)
                return self._give_up_quorum(f"rank {group_rank} has restarted", now) if is_other else []
            case events.WatchEnded(watch):
                rank = self.watches.ended(watch, now)
                return [] if rank is None else self._lose(rank, now)
            case events.RankLeaves(watch, step):
                mates = self.watches.staying_ranks - set(self.waiting) if step is not None else set[int]()
                if self.watches.leaves(watch, mates):
                    self.grants.leave(step)
                return []
            case events.RanksStarted(group_ranks):
                self.watches.started(group_ranks)
                return []
            case events.RankHealed(group_rank, rank_incarnation, totals):
                self.counts.healed(group_rank, rank_incarnation, totals)
                return []
            case events.RankFailed(group_rank, rank_incarnation, reason, ends_group):
                is_known = self.watches.failed(group_rank, rank_incarnation, reason, now)
                reported = events.FailureReported(group_rank, reason, is_known)
                if not is_known:
                    return [reported]
                effects = [reported, *self._lose(group_rank, now)]
                mates = self.watches.loss_of(group_rank).mates
                if not ends_group:
                    return effects
                return [*effects, *self._end_mates(group_rank, mates, reason, now), events.GroupGivenUp(reason)]

    def _release(self) -> list[events.Effect]:
        """Release the leaving ranks that no mate needs any more. In a LEAVING group, its peers may still need them."""
        leaving = () if self.grants.is_leaving else self.watches.release()
        return [events.Pushed(Released(), leaving)] if leaving else []

    def _decide_again(self, now: float) -> list[events.Effect]:
        """Decide again on the requests that wait for a decision."""
        waiting = self.group.pending(is_gathering=False)
        self.group.clear(is_gathering=False)
        effects: list[events.Effect] = []
        for ask in waiting:
            effects += self._ask(ask, now)
        return effects

    def _enter_quorum(self, quorum: Quorum, now: float, *, stands: bool) -> list[events.Effect]:
        """Let the ranks into the first step of the quorum that answers their join."""
        init_sync = all(ask.init_sync for ask in self.gather.asks)
        answered = self.gather.receive(self.gather.round, quorum, stands=stands)
        is_taken = any(isinstance(effect, gather.RoundAnswered) for effect in answered)
        if is_taken and stands:
            self.grants.take(quorum, self.gather.max_step, init_sync=init_sync)
        elif is_taken:
            self.grants.drop()
        if is_taken:
            mine = next(effect.assignment for effect in answered if isinstance(effect, events.QuorumAnswered))
            self.counts.began(now, has_healing=mine.has_healing or mine.catches_up)
        return self._perform_gather(answered, now)

    def _refuse_join(self, error: LighthouseError, now: float) -> list[events.Effect]:
        """Refuse the ranks' requests because the lighthouse has refused their join."""
        self._dismiss(self.gather.waiting, error)
        return self._perform_gather(self.gather.fail(self.gather.round, error), now)

    def _refuse_all(self, error: LighthouseError, now: float) -> list[events.Effect]:
        """Refuse every gathering request."""
        self._dismiss(self.gather.waiting, error)
        return self._perform_gather(self.gather.refuse_all(error), now)

    def _dismiss(self, group_ranks: Iterable[int], error: LighthouseError) -> None:
        if isinstance(error, Drained):
            for rank in group_ranks:
                self.group.ranks[rank].is_dismissed = True

    def _note_calls(self, now: float) -> None:
        """Restart the rank timeout of ranks with open calls."""
        if self.watches.times_out:
            self.watches.heard((*self.waiting, *self.commit.voters), now)

    def _expire_ranks(self, now: float) -> list[events.Effect]:
        """Handle the ranks that exceed the rank timeout, and the lost ranks that have not returned in time."""
        effects: list[events.Effect] = []
        for rank in self.watches.expire(now):
            effects += self._lose(rank, now)
        for absence in self.watches.given_up(now):
            effects += self._give_up_rank(absence, now)
        return effects

    def _lose(self, group_rank: int, now: float) -> list[events.Effect]:
        """End the request of a lost rank, the step that it has not voted on, and the quorum."""
        gone = WrongState(self.watches.loss_of(group_rank).reason)
        effects = self._refuse(group_rank, gone, now)
        effects += self._perform_commit(self.commit.lose(group_rank), now, str(gone))
        return effects + self._give_up_quorum(str(gone), now)

    def _refuse(self, group_rank: int, error: LighthouseError, now: float) -> list[events.Effect]:
        """Refuse the waiting request of a rank, if it has one."""
        effects: list[events.Effect] = []
        if (ask := self._take_held_back(group_rank)) is not None:
            effects.append(events.CallRefused(ask.call, error))
        if (call := self.gather.call_of(group_rank)) is not None:
            effects += self._perform_gather(self.gather.withdraw(call), now)
            effects.append(events.CallRefused(call, error))
        return effects

    def _take_held_back(self, group_rank: int) -> QuorumRequest | None:
        """Remove and return the rank's request that waits for a decision, if it has one."""
        rank = self.group.ranks[group_rank]
        if rank.pending is None or rank.pending.is_gathering:
            return None
        request, rank.pending = rank.pending.request, None
        return request

    def _give_up_rank(self, absence: LostRank, now: float) -> list[events.Effect]:
        rank = absence.group_rank
        where = ", was restarted and has not connected yet" if absence.is_restarted else " and has not reconnected"
        reason = absence.reason + where
        return [
            *self._end_mates(rank, absence.mates, reason, now),
            events.RankGivenUp(rank, reason, absence.lost_at, absence.has_left, absence.is_restarted),
        ]

    def _end_mates(self, group_rank: int, mates: frozenset[str], reason: str, now: float) -> list[events.Effect]:
        """Notify the mates of a lost rank, and refuse their requests."""
        effects: list[events.Effect] = [
            events.Pushed(RankGone(group_rank, reason), self.watches.of(mates)),
            *self._miss([group_rank]),
        ]
        for ask in (*self.group.pending(is_gathering=False), *self.gather.asks):
            if ask.rank_incarnation in mates:
                effects += self._refuse(ask.group_rank, WrongState(reason), now)
        return effects

    def _miss(self, group_ranks: Iterable[int]) -> list[events.Effect]:
        """Refuse votes on an inherited attempt if only these lost ranks may have known the decision."""
        return [
            effect
            for rank in group_ranks
            for effect in _refusals(self.commit.miss(rank, self.watches.loss_of(rank).reason))
        ]

    def _ask(self, ask: QuorumRequest, now: float) -> list[events.Effect]:
        """Grant a request under the standing quorum, let it wait, or let it gather for a join."""
        older = self._take_held_back(ask.group_rank)
        effects: list[events.Effect] = (
            [] if older is None else [events.CallRefused(older.call, superseded(ask.group_rank))]
        )
        decision = self.grants.decide(ask, now)
        if isinstance(decision, Wait):
            self.group.wait(ask, is_gathering=False)
            return effects
        if isinstance(decision, Join):
            if self.drains:
                self.group.ranks[ask.group_rank].is_dismissed = True
                return [*effects, events.CallRefused(ask.call, self._drained()), *self._leave(now)]
            effects += self._push_revoked(f"rank {ask.group_rank} cannot go on with it") if decision.gives_up else []
            return effects + self._perform_gather(self.gather.ask(ask), now)
        effects += self._open_step(now) if decision.is_first else []
        return [*effects, events.QuorumAnswered(ask.call, decision.assignment, None)]

    def _open_step(self, now: float) -> list[events.Effect]:
        held = self.grants.held
        assert held is not None
        self.counts.began(now, has_healing=self.grants.assignment(0, True).catches_up)
        return self._open_attempt(held.quorum_id, held.granted)

    def _open_attempt(self, quorum_id: int, step: int) -> list[events.Effect]:
        for rank in self.group.ranks:
            rank.wants_next = False
        return _refusals(self.commit.open(quorum_id, step))

    def _end_call(self, call: int, now: float) -> list[events.Effect]:
        self.group.withdraw(call, is_gathering=False)
        effects = self._perform_gather(self.gather.withdraw(call), now)
        self.commit.withdraw(call)
        return effects

    def _expire_call(self, call: int, error: LighthouseError, now: float) -> list[events.Effect]:
        """End a call at its deadline. If the group has joined, refuse the requests of all ranks with the same error."""
        was_joined = self.gather.is_joined
        effects = self._end_call(call, now)
        is_taken_back = was_joined and not self.gather.is_joined
        return effects + (self._refuse_all(error, now) if is_taken_back else [])

    def _perform_gather(self, effects: Sequence[gather.Effect], now: float) -> list[events.Effect]:
        """Perform the effects of gathering: send joins to the lighthouse, and open the attempt at a quorum's step."""
        performed: list[events.Effect] = []
        for effect in effects:
            match effect:
                case gather.GroupJoined():
                    joined = effect
                    if self.grants.has_done_late_step:
                        works_at = self.grants.granted + 1
                        joined = replace(effect, works_at=works_at, commit_failures=0)
                    performed += self._send(self.session.join(self._participant(joined), joined.deadline_at, now))
                case gather.JoinTakenBack():
                    performed += self._send(self.session.withdraw())
                case gather.RoundAnswered(quorum_id, step):
                    performed += self._open_attempt(quorum_id, step)
                case _:
                    performed.append(effect)
        return performed

    def _perform_commit(self, effects: Sequence[commit.Effect], now: float, rank_lost: str = "") -> list[events.Effect]:
        """Perform the effects of votes. `rank_lost` is the reason if the loss of a rank has caused them."""
        performed = _refusals(effects)
        offers = False
        for effect in effects:
            if isinstance(effect, commit.StepDecided):
                self._count(effect, now, is_rank_lost=bool(rank_lost))
            match effect:
                case commit.StepDecided(_, _, True):
                    offers = self._committed(effect, now)
                    performed += self._open_step(now) if offers else []
                case commit.StepDecided(quorum_id) if self.grants.ends_by_discard(quorum_id):
                    performed += self._give_up_quorum(rank_lost or "a step was discarded", now)
                case events.VoteAnswered(call, decision, group_rank):
                    grant = self.grants.assignment(group_rank, True) if offers else None
                    performed.append(events.VoteAnswered(call, replace(decision, next=grant), group_rank))
                case _:
                    pass
        return performed

    def _count(self, decided: commit.StepDecided, now: float, *, is_rank_lost: bool) -> None:
        if decided.commit:
            self.counts.committed(now)
        else:
            self.counts.discarded(decided.quorum_id, is_rank_lost=is_rank_lost)

    def _committed(self, decided: commit.StepDecided, now: float) -> bool:
        """Record a commit. Return whether the answers carry the grant of the next step."""
        self.grants.committed(decided.quorum_id, decided.step)
        wants = all(rank.wants_next for rank in self.group.ranks)
        return wants and not self.drains and self.grants.offer(now)

    def _give_up_quorum(self, reason: str, now: float) -> list[events.Effect]:
        """End the held quorum for this group, and make the ranks abort its unfinished collectives."""
        if self.grants.held is None or not self.grants.give_up():
            return []
        return self._push_revoked(reason) + self._decide_again(now)

    def _note_request(self, request: QuorumRequest) -> list[commit.Effect]:
        return self.commit.note_request(request, has_quorum=self.grants.held is not None)

    def _push_revoked(self, reason: str, lost: str = "") -> list[events.Effect]:
        held = self.grants.held
        return [] if held is None else [events.Pushed(Revoked(held.quorum_id, reason, lost), self.watches.staying())]

    # -- the lighthouse

    def _receive(self, message: session.ToManager, now: float) -> list[events.Effect]:
        match message:
            case session.Welcome(_, _, order):
                self.session.welcomed(message, now)
                return self._obey(order, now)
            case session.HeartbeatAck(_, _, order):
                sent_at = self.session.acknowledged(message, now)
                effects = self._obey(order, now)
                if sent_at is not None:
                    self.grants.renew(sent_at + LEASE_SHARE * self.session.lease_s)
                return effects + self._open(now) + self._decide_again(now)
            case session.JoinAccepted(join) | session.QuorumChanged(join):
                if not self.session.is_waiting(join):
                    return []
                self._unopened = self.session.whole(message)
                return self._open(now) if self._unopened is not None else self._send(self.session.ask_whole(now))
            case session.JoinRejected(join, error):
                is_ours = self.session.answered(join) if join else self.gather.is_joined
                if is_ours and isinstance(error, Drained) and not self.drains:  # the job has ended for this group
                    self._draining, self._why_over, self.drains = str(error), str(error), True
                effects = self._refuse_join(error, now) if is_ours else []
                if not join and isinstance(error, WrongState):  # the group is not admitted
                    effects += self._give_up_quorum(str(error), now)
                return effects + (self._leave(now) if is_ours and self.drains else [])
            case session.QuorumOrder():
                return self._obey(message, now)
            case session.DrainRequest(reason):
                return self._dispatch(events.DrainAsked(reason or "the lighthouse was asked to drain it"), now)
            case session.KillRequest(reason, behind):
                return [events.Killed(reason, behind)]
            case World():
                self._awaited = message.waiting_for
                return [events.WorldChanged(replace(message, group_world_size=self.me.group_world_size))]
            case session.EvidenceRequest():
                return [events.EvidenceWanted(message)]
            case session.Goodbye(reason):
                self._let_go = reason if self._has_left else ""
                return []

    def _obey(self, order: session.QuorumOrder | None, now: float) -> list[events.Effect]:
        if order is None:
            return []
        if order.phase is QuorumPhase.REVOKED:
            self.counts.revoked(order.quorum_id, is_group_lost=bool(order.lost))
        revoked = self._push_revoked(order.reason, order.lost) if self.grants.obey(order) else []
        effects = revoked + self._decide_again(now)
        accepted, is_revoked = self._unopened, order.phase is QuorumPhase.REVOKED
        if accepted is None or not is_revoked or order.quorum_id != accepted.quorum.quorum_id:
            return effects
        return effects + self._drop_unopened(accepted, order.reason, now)

    def _open(self, now: float) -> list[events.Effect]:
        """Let the ranks into the received quorum. Like every grant of a standing quorum, this needs a valid lease."""
        accepted = self._unopened
        if accepted is None or (accepted.stands and now >= self.grants.renewed_until):
            return []
        self._unopened = None
        if not self.session.answered(accepted.join):  # taken back in the meantime
            return []
        self._secrets[accepted.quorum.quorum_id] = accepted.secret
        for older in sorted(self._secrets)[:-SECRETS_KEPT]:
            del self._secrets[older]
        return self._enter_quorum(accepted.quorum, now, stands=accepted.stands)

    def _drop_unopened(self, accepted: session.JoinAccepted, reason: str, now: float) -> list[events.Effect]:
        self._unopened = None
        if not self.session.answered(accepted.join):
            return []
        return self._refuse_join(
            WrongState(f"quorum {accepted.quorum.quorum_id} was revoked: {reason}; ask again"), now
        )

    def _participant(self, joined: gather.GroupJoined | None = None) -> Participant:
        me = replace(
            self.me,
            incarnation=self.incarnation,
            step=self.gather.step,
            seen_quorum_id=self.gather.quorum_id,
            watched=self.watches.is_complete,
        )
        if joined is None:
            return me
        return replace(
            me,
            step=joined.step,
            shrink_only=joined.shrink_only,
            commit_failures=joined.commit_failures,
            tag_quorum_id=joined.tag_quorum_id,
            ranks_disagree=joined.ranks_disagree,
            catch_up=joined.catch_up,
            works_at=joined.works_at,
            has_source=joined.has_source,
            compares=joined.compares,
            distrust=joined.distrust,
            heals_first=joined.heals_first,
            wire=self._show_handles(joined.handles) if self._show_handles is not None else b"",
        )

    def _listen(self, now: float) -> list[events.Effect]:
        is_silent = self.session.news_of_silence(now)
        if is_silent is None:
            return []
        silent = events.SessionSilent("it has not answered the last heartbeat")
        return [silent if is_silent else events.SessionHeard()]

    def _note_changes(self, effects: Sequence[events.Effect]) -> list[events.Effect]:
        """Report changes of the missing ranks, and of whether requests wait."""
        changes: list[events.Effect] = []
        missing, is_waiting = self.group.missing, self.is_waiting
        if missing != self._missing:
            self._missing = missing
            changes.append(events.MissingChanged(say_missing(self.me, missing)))
        was_answered = any(isinstance(e, events.QuorumAnswered) and not e.assignment.revoked for e in effects)
        if is_waiting and (was_answered or not self._is_waiting):
            changes.append(events.WaitBegan())
        elif self._is_waiting and not is_waiting:
            changes.append(events.WaitEnded())
        self._is_waiting = is_waiting
        return changes

    # -- leaving

    def _drained(self) -> Drained:
        return Drained(f"{self.me.replica_id} leaves: {self._draining}")

    def _leave_if_idle(self, now: float) -> list[events.Effect]:
        """Leave if the group has no ranks or waits for a quorum, because then it has no step to finish.

        If a join is pending at the lighthouse, its quorum may already be on its way. Then the lighthouse either refuses
        the join because of the drain, or the group does the quorum's steps.
        """
        if self.gather.is_joined and self.session.is_open:
            return []
        return self._leave(now) if self.gather.waiting or not self.watches.has_ranks else []

    def _leave_if_over(self, now: float) -> list[events.Effect]:
        """Leave if all ranks have ended while the group drains."""
        return self._leave(now) if self.drains and not self.watches.has_ranks else []

    def _leave(self, now: float) -> list[events.Effect]:
        if self._has_left:
            return []
        self._has_left = True
        effects = self._refuse_all(self._drained(), now)
        if not self.session.is_open:
            self._let_go = "it had no session to say so on"
            return effects
        messages = self.session.leave(self._draining)
        self.session.closed()
        return effects + self._send(messages)

    def _end(self) -> list[events.Effect]:
        """End once the session has ended and every rank has been notified that the group leaves."""
        if self._has_ended or not self._let_go or self.unaware:
            return []
        self._has_ended = True
        return [events.HasLeft(self._why_over or self._let_go)]

    def _send(self, messages: Sequence[session.ToLighthouse]) -> list[events.Effect]:
        return [events.Sent(message) for message in messages]


def _refusals(effects: Sequence[commit.Effect]) -> list[events.Effect]:
    return [effect for effect in effects if isinstance(effect, events.CallRefused)]
