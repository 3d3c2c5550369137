"""One replica group's manager as one machine: its ranks on one side, the lighthouse on the other. No I/O.

ranks.py and lighthouse_session.py hold the rules of the two sides; here they meet:

1. What the ranks' side joins and takes back is said on the session; what comes by that goes to the ranks.
2. Ranks are let into the step that a quorum was formed for only under a valid lease.
3. What the lighthouse waits for (the quorum given up, a rank lost) it hears in the same moment.
4. A group that drains does the steps that it has promised, and leaves where it would join.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant, Quorum, Tag, World
from lighthouse_protocol.messages.session import (
    LEFT,
    RESTARTING,
    STARTING,
    QuorumOrder,
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
from manager.group.presence import LostRank, RankPresence
from manager.group.requests import LEASE_SHARE, GrantMachine, Join, QuorumRequest, Wait, no_such_rank, superseded
from manager.group.session import ProgressReporter, SessionMachine

# -- ranks --------------------------------------------------------------------
#
# The ranks of a group as one machine: what they ask and vote becomes answers to them, and joins of the group. No I/O.
#
# gather.py, grants.py, commit.py and rank_presence.py hold the rules; here they meet:
#
# 1. A rank's request for a quorum is granted here, waits here, or goes to gather, which joins when all have asked.
# 2. A decision of all ranks is what the next grant is built on; where all ranks want it, it carries that grant. A
#    discard ends the quorum for this group.
# 3. A rank that is lost ends it, too: the other ranks are told that the quorum is revoked. If it does not come back,
#    they are told that it is gone, and what they ask for is void: inside the group they wait for it in vain.
# 4. A rank that leaves in good order, with its last step committed, stays until the quorum is over: its peers may
#    still read what it has sent. So may its mates, after the step, until they leave or ask for the next one. Then it
#    is released.


@dataclass(frozen=True, slots=True)
class EndReached:
    """A rank asks by `call` for more than was promised, while the group drains: it leaves where it would join."""

    call: int


Effect = (
    events.QuorumAnswered
    | commit.Decided
    | events.CallRefused
    | events.Pushed
    | events.FailureReported
    | events.RankGivenUp
    | events.GroupGivenUp
    | gather.GroupJoined
    | gather.JoinTakenBack
    | EndReached
)


class Ranks:
    """`rank_timeout_s` bounds how long a rank without a watch may be silent."""

    def __init__(self, wire_id: str, group_world_size: int, rank_timeout_s: float | None = None) -> None:
        self._size = group_world_size
        self.gather = gather.GatherMachine(wire_id, group_world_size)
        self.commit = commit.CommitMachine(group_world_size)
        self.grants = GrantMachine(wire_id, group_world_size)
        self.watches = RankPresence(group_world_size, rank_timeout_s)
        self.counts = StepCounts()
        self.drains = False
        self._dismissed: set[int] = set()
        self._waiting: dict[int, QuorumRequest] = {}
        self._wants_next: dict[int, bool] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """Those whose requests wait, here or in gather."""
        return tuple(sorted({*self.gather.waiting, *self._waiting}))

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or bool(self.gather.asks)

    @property
    def down(self) -> str:
        """Why the group cannot take part now; empty: its ranks are there."""
        if self.grants.is_leaving:
            return LEFT
        if self.watches.is_restarting:
            return RESTARTING
        if self.watches.lost:
            return self.watches.why_lost(self.watches.lost[0])
        return STARTING if self.watches.is_starting else ""

    @property
    def unaware(self) -> set[int]:
        """The ranks that go on, and have not been told yet that the group leaves. A rank that leaves asks no more."""
        return self.watches.staying_ranks - self._dismissed

    def handle(self, event: events.RankEvent, now: float) -> list[Effect]:
        match event:
            case QuorumRequest() | commit.Voted() if not 0 <= event.group_rank < self._size:
                return [events.CallRefused(event.call, no_such_rank(event.group_rank, self._size))]
            case QuorumRequest():
                self.watches.asked(event.group_rank)
                self.watches.heard((event.group_rank,), now)
                return self._perform_commit(self.commit.handle(self._asked(event)), now) + self._ask(event, now)
            case commit.Voted():
                self.watches.heard((event.group_rank,), now)
                self.watches.moves_on(event.group_rank)
                self._wants_next[event.group_rank] = event.wants_next
                was_last = self.grants.voted(event.group_rank, event.quorum_id, event.step)
                effects = self._perform_commit(self.commit.handle(event), now)
                for ask in self.gather.asks:
                    effects += self._perform_commit(self.commit.handle(self._asked(ask)), now)
                effects += self._miss(self.watches.missed)
                return effects + (self.decide_again(now) if was_last else [])
            case events.CallEnded(call):
                return self._end_call(call)
            case events.CallExpired(call, error):
                return self._expire_call(call, error)
            case events.WatchOpened(watch, group_rank, rank_incarnation):
                is_other = self.watches.opened(watch, group_rank, rank_incarnation)
                return self.give_up(f"rank {group_rank} has restarted", now) if is_other else []
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
                mates = self.watches.mates_of(group_rank)
                if not ends_group:
                    return effects
                return [*effects, *self._end_mates(group_rank, mates, reason), events.GroupGivenUp(reason)]

    def release(self) -> list[Effect]:
        """Rule 4."""
        leaving = () if self.grants.is_leaving else self.watches.release()
        return [events.Pushed(Released(), leaving)] if leaving else []

    # -- what the lighthouse says

    def obey(self, order: QuorumOrder, now: float) -> list[Effect]:
        if order.phase is QuorumPhase.REVOKED:
            self.counts.revoked(order.quorum_id, is_group_lost=bool(order.lost))
        revoked = self._push_revoked(order.reason, order.lost) if self.grants.obey(order) else []
        return revoked + self.decide_again(now)

    def decide_again(self, now: float) -> list[Effect]:
        """The first rank's request decides for the step; so all that wait are looked at again."""
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for ask in waiting.values():
            effects += self._ask(ask, now)
        return effects

    def receive(self, quorum: Quorum, now: float, *, stands: bool) -> list[Effect]:
        """The quorum that the group has joined: its ranks are let into the step that it was formed for."""
        init_sync = all(ask.init_sync for ask in self.gather.asks)
        answered = self.gather.handle(gather.QuorumReceived(self.gather.round, quorum, stands))
        is_taken = any(isinstance(effect, gather.RoundAnswered) for effect in answered)
        if is_taken and stands:
            self.grants.take(quorum, self.gather.max_step, init_sync=init_sync)
        elif is_taken:
            self.grants.drop()
        if is_taken:
            mine = next(effect.assignment for effect in answered if isinstance(effect, gather.RankAnswered))
            self.counts.began(now, has_healing=mine.has_healing or mine.catches_up)
        return self._perform_gather(answered)

    def refuse_join(self, error: LighthouseError) -> list[Effect]:
        """The group's join, if it has joined, was answered with `error`."""
        self._dismiss(self.gather.waiting, error)
        return self._perform_gather(self.gather.handle(gather.JoinFailed(self.gather.round, error)))

    def refuse_all(self, error: LighthouseError) -> list[Effect]:
        """Every rank that gathers gets `error`."""
        self._dismiss(self.gather.waiting, error)
        return self._perform_gather(self.gather.refuse_all(error))

    def _dismiss(self, group_ranks: Iterable[int], error: LighthouseError) -> None:
        if isinstance(error, Drained):
            self._dismissed |= set(group_ranks)

    # -- silence

    def hear(self, now: float) -> None:
        """A rank with a call under way is there, to the end of that call."""
        if self.watches.times_out:
            self.watches.heard((*self.waiting, *self.commit.voters), now)

    def expire(self, now: float) -> list[Effect]:
        """Those that have been silent for too long are lost, those that are not back are given up."""
        effects: list[Effect] = []
        for rank in self.watches.expire(now):
            effects += self._lose(rank, now)
        for absence in self.watches.given_up(now):
            effects += self._give_up_rank(absence)
        return effects

    # -- within

    def _lose(self, group_rank: int, now: float) -> list[Effect]:
        """What it still asks for is void: it would stand for a rank that is not there."""
        gone = WrongState(self.watches.why_lost(group_rank))
        effects = self._refuse(group_rank, gone)
        effects += self._perform_commit(self.commit.handle(commit.RankLost(group_rank)), now, str(gone))
        return effects + self.give_up(str(gone), now)

    def _refuse(self, group_rank: int, error: LighthouseError) -> list[Effect]:
        """What the rank asks for, if it does."""
        effects: list[Effect] = []
        if (ask := self._waiting.pop(group_rank, None)) is not None:
            effects.append(events.CallRefused(ask.call, error))
        if (call := self.gather.call_of(group_rank)) is not None:
            effects += self._perform_gather(self.gather.handle(gather.Withdrawn(call)))
            effects.append(events.CallRefused(call, error))
        return effects

    def _give_up_rank(self, absence: LostRank) -> list[Effect]:
        rank = absence.group_rank
        is_started = self.watches.is_started(rank)
        where = ", was restarted and has not connected yet" if is_started else " and has not reconnected"
        reason = self.watches.why_lost(rank) + where
        return [
            *self._end_mates(rank, absence.mates, reason),
            events.RankGivenUp(rank, reason, absence.lost_at, absence.has_left, is_started),
        ]

    def _end_mates(self, group_rank: int, mates: frozenset[str], reason: str) -> list[Effect]:
        """The processes that the lost rank has left behind are told, and wait for nothing here."""
        effects: list[Effect] = [
            events.Pushed(RankGone(group_rank, reason), self.watches.of(mates)),
            *self._miss([group_rank]),
        ]
        for ask in (*self._waiting.values(), *self.gather.asks):
            if ask.rank_incarnation in mates:
                effects += self._refuse(ask.group_rank, WrongState(reason))
        return effects

    def _miss(self, group_ranks: Iterable[int]) -> list[Effect]:
        """What they may have known of a step that was decided before this manager started is gone with them."""
        missed = (commit.RankMissed(rank, self.watches.why_lost(rank)) for rank in group_ranks)
        return [effect for each in missed for effect in _refusals(self.commit.handle(each))]

    def _ask(self, ask: QuorumRequest, now: float) -> list[Effect]:
        """It takes the place of an older call of its rank that waits, here or in gather."""
        older = self._waiting.pop(ask.group_rank, None)
        effects: list[Effect] = [] if older is None else [events.CallRefused(older.call, superseded(ask.group_rank))]
        decision = self.grants.decide(ask, now)
        if isinstance(decision, Wait):
            self._waiting[ask.group_rank] = ask
            return effects
        if isinstance(decision, Join):
            if self.drains:
                self._dismissed.add(ask.group_rank)
                return [*effects, EndReached(ask.call)]
            effects += self._push_revoked(f"rank {ask.group_rank} cannot go on with it") if decision.gives_up else []
            return effects + self._perform_gather(self.gather.handle(ask))
        effects += self._open_step(now) if decision.is_first else []
        return [*effects, events.QuorumAnswered(ask.call, decision.assignment, None)]

    def _open_step(self, now: float) -> list[Effect]:
        held = self.grants.held
        assert held is not None
        self.counts.began(now, has_healing=self.grants.assignment(0, True).catches_up)
        return self._open_attempt(commit.Opened(held.quorum_id, held.granted))

    def _open_attempt(self, opened: commit.Opened) -> list[Effect]:
        self._wants_next = {}
        return _refusals(self.commit.handle(opened))

    def _end_call(self, call: int) -> list[Effect]:
        self._waiting = {rank: ask for rank, ask in self._waiting.items() if ask.call != call}
        effects = self._perform_gather(self.gather.handle(gather.Withdrawn(call)))
        self.commit.handle(commit.Withdrawn(call))
        return effects

    def _expire_call(self, call: int, error: LighthouseError) -> list[Effect]:
        """A join is over for all ranks with the first one's time, and for the same reason."""
        effects = self._end_call(call)
        is_taken_back = any(isinstance(effect, gather.JoinTakenBack) for effect in effects)
        return effects + (self.refuse_all(error) if is_taken_back else [])

    def _perform_gather(self, effects: Sequence[gather.Effect]) -> list[Effect]:
        performed: list[Effect] = []
        for effect in effects:
            match effect:
                case gather.GroupJoined() if self.grants.has_done_late_step:
                    works_at = self.grants.granted + 1
                    performed.append(replace(effect, works_at=works_at, commit_failures=0))
                case gather.GroupJoined() | gather.JoinTakenBack():
                    performed.append(effect)
                case gather.RoundAnswered(quorum_id, step):
                    performed += self._open_attempt(commit.Opened(quorum_id, step))
                case gather.RankAnswered(call, assignment, quorum):
                    performed.append(events.QuorumAnswered(call, assignment, quorum))
                case gather.RankRefused(call, error):
                    performed.append(events.CallRefused(call, error))
        return performed

    def _perform_commit(self, effects: Sequence[commit.Effect], now: float, rank_lost: str = "") -> list[Effect]:
        """`rank_lost`: the loss that has caused them."""
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
                    performed += self.give_up(rank_lost or "a step was discarded", now)
                case commit.Decided(_, _, group_rank):
                    grant = self.grants.assignment(group_rank, True) if offers else None
                    performed.append(replace(effect, next=grant))
                case _:
                    pass
        return performed

    def _count(self, decided: commit.StepDecided, now: float, *, is_rank_lost: bool) -> None:
        if decided.commit:
            self.counts.committed(now)
        else:
            self.counts.discarded(decided.quorum_id, is_rank_lost=is_rank_lost)

    def _committed(self, decided: commit.StepDecided, now: float) -> bool:
        """Whether the ranks are let into the next step with the same answer."""
        self.grants.committed(decided.quorum_id, decided.step)
        wants = len(self._wants_next) == self._size and all(self._wants_next.values())
        return wants and not self.drains and self.grants.offer(now)

    def give_up(self, reason: str, now: float) -> list[Effect]:
        """This group ends the quorum that it holds: the other ranks are to abort what has not completed."""
        if self.grants.held is None or not self.grants.give_up():
            return []
        return self._push_revoked(reason) + self.decide_again(now)

    def _asked(self, ask: QuorumRequest) -> commit.Asked:
        stands = self.grants.held is not None
        torn = Tag(ask.distrust.step, ask.distrust.quorum_id) if ask.distrust is not None else None
        return commit.Asked(ask.group_rank, ask.step, ask.tag_quorum_id, ask.commit_failures > 0, stands, torn)

    def _push_revoked(self, reason: str, lost: str = "") -> list[Effect]:
        held = self.grants.held
        return [] if held is None else [events.Pushed(Revoked(held.quorum_id, reason, lost), self.watches.staying())]


def _refusals(effects: Sequence[commit.Effect]) -> list[Effect]:
    return [events.CallRefused(e.call, e.error) for e in effects if isinstance(e, commit.VoteRefused)]


SECRETS_KEPT = 4  # a peer may ask under the quorum that this group has just left


class GroupMachine:
    """`me` is this group's participant but for what changes from join to join; `life` names the manager's start.

    Time is the caller's monotonic clock and never goes back.
    """

    def __init__(
        self,
        me: Participant,
        life: str,
        show_handles: Callable[[tuple[str, ...]], bytes] = lambda handles: b"",
        rank_timeout_s: float | None = None,
        progress: ProgressReporter | None = None,
        secret: str = "",
    ) -> None:
        """`show_handles`: how torchft's handles of the ranks are relayed to the peers. `rank_timeout_s` bounds how long
        a rank without a watch may be silent. `progress`: what heartbeats carry of where the ranks are. `secret`: by
        it the lighthouse knows this start of the manager again."""
        self.me = me
        self._life = life
        self._show_handles = show_handles
        self.ranks = Ranks(me.wire_id, me.group_world_size, rank_timeout_s)
        self.session = SessionMachine(lambda: self.report, progress, secret)
        self._unopened: session.JoinAccepted | None = None
        self._secrets: dict[int, str] = {}  # of the last quorums, by id
        self._draining = ""
        self._why_over = ""  # by the lighthouse's word
        self._has_left = self._has_ended = False
        self._let_go = ""
        self._awaited = ""  # by the lighthouse's words
        self._missing = self.ranks.watches.missing
        self._is_waiting = False

    @property
    def incarnation(self) -> str:
        return f"{self._life}.{self.ranks.gather.incarnation}"

    @property
    def report(self) -> session.GroupReport:
        ranks = self.ranks
        return session.GroupReport(self.held, ranks.drains, ranks.down, ranks.watches.missing, ranks.counts.told)

    @property
    def held(self) -> session.HeldQuorum | None:
        return self.ranks.grants.held

    def status(self) -> GroupStatus:
        gathered, commit, held = self.ranks.gather, self.ranks.commit, self.held
        return GroupStatus(
            me=self.me,
            incarnation=self.incarnation,
            held=held,
            quorum_id=gathered.quorum_id,
            step=max(gathered.step, held.granted if held is not None else 0),
            is_joined=gathered.is_joined,
            is_gathering=bool(gathered.asks),
            is_voting=commit.is_voting,
            waiting=self.ranks.waiting,
            missing=self.ranks.watches.missing,
            awaited=self._awaited,
            commits=self.ranks.counts.commits,
            discards=self.ranks.counts.discards,
            grants=self.ranks.grants.given,
        )

    def secret_of(self, quorum_id: int) -> str:
        """Of that quorum's members; empty: this group is none, or it is long ago."""
        return self._secrets.get(quorum_id, "")

    @property
    def proves_itself(self) -> bool:
        """Its ranks are Agents, and serve their states to members of their quorum alone."""
        return bool(self._secrets) and self.ranks.watches.is_complete

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """As in GatherMachine."""
        return self.ranks.gather.checkpoint_address(group_rank, step)

    def handle(self, event: events.Event, now: float) -> Sequence[events.Effect]:
        self.ranks.hear(now)
        effects = self._dispatch(event, now)
        self.ranks.hear(now)
        effects += self._perform(self.ranks.release(), now) + self._leave_if_over(now)
        effects += self._send(self.session.tick(now)) + self._listen(now) + self._end()
        return effects + self._note_changes(effects)

    def tick(self, now: float) -> Sequence[events.Effect]:
        self.ranks.hear(now)
        effects = self._perform(self.ranks.expire(now), now)
        if self.session.is_given_up(now):
            self.session.closed()
            effects.append(
                events.SessionGivenUp(f"the lighthouse has answered no heartbeat for {self.session.lease_s:g} s")
            )
        else:
            effects += self._send(self.session.tick(now)) + self._listen(now)
        return effects + self._note_changes(effects)

    def deadline(self) -> float | None:
        """When to call tick next."""
        deadlines = (self.session.deadline(), self.ranks.watches.deadline())
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
                return self._leave_if_idle(now) if self.ranks.drains else []
            case events.Received(message):
                return self._receive(message, now)
            case events.WasLate(by_s):
                self.ranks.watches.shift(by_s)
                return []
            case events.DrainAsked(reason):
                self._draining, self.ranks.drains = self._draining or reason, True
                return self._leave_if_idle(now)
            case _:
                return self._perform(self.ranks.handle(event, now), now)

    def _perform(self, effects: Sequence[Effect], now: float) -> list[events.Effect]:
        """What the ranks' side does to the group's join is said to the lighthouse; the rest is for the driver."""
        performed: list[events.Effect] = []
        for effect in effects:
            match effect:
                case gather.GroupJoined():
                    performed += self._send(self.session.join(self._participant(effect), effect.deadline_at, now))
                case gather.JoinTakenBack():
                    performed += self._send(self.session.withdraw())
                case EndReached(call):
                    performed += [events.CallRefused(call, self._drained()), *self._leave(now)]
                case _:
                    performed.append(effect)
        return performed

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
                    self.ranks.grants.renew(sent_at + LEASE_SHARE * self.session.lease_s)
                return effects + self._open(now) + self._perform(self.ranks.decide_again(now), now)
            case session.JoinAccepted(join) | session.QuorumChanged(join):
                if not self.session.is_waiting(join):
                    return []
                self._unopened = self.session.whole(message)
                return self._open(now) if self._unopened is not None else self._send(self.session.ask_whole(now))
            case session.JoinRejected(join, error):
                is_ours = self.session.answered(join) if join else self.ranks.gather.is_joined
                if is_ours and isinstance(error, Drained) and not self.ranks.drains:  # no further step is left for it
                    self._draining, self._why_over, self.ranks.drains = str(error), str(error), True
                effects = self._refuse_join(error, now) if is_ours else []
                if not join and isinstance(error, WrongState):  # it has no place there, whatever it holds
                    effects += self._perform(self.ranks.give_up(str(error), now), now)
                return effects + (self._leave(now) if is_ours and self.ranks.drains else [])
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
        effects = self._perform(self.ranks.obey(order, now), now)
        accepted, is_revoked = self._unopened, order.phase is session.QuorumPhase.REVOKED
        if accepted is None or not is_revoked or order.quorum_id != accepted.quorum.quorum_id:
            return effects
        return effects + self._drop_unopened(accepted, order.reason, now)

    def _open(self, now: float) -> list[events.Effect]:
        """Let the ranks into the step that a quorum was formed for: a grant like any other, under a valid lease."""
        accepted = self._unopened
        if accepted is None or (accepted.stands and now >= self.ranks.grants.renewed_until):
            return []
        self._unopened = None
        if not self.session.answered(accepted.join):  # taken back since
            return []
        self._secrets[accepted.quorum.quorum_id] = accepted.secret
        for older in sorted(self._secrets)[:-SECRETS_KEPT]:
            del self._secrets[older]
        return self._perform(self.ranks.receive(accepted.quorum, now, stands=accepted.stands), now)

    def _drop_unopened(self, accepted: session.JoinAccepted, reason: str, now: float) -> list[events.Effect]:
        self._unopened = None
        if not self.session.answered(accepted.join):
            return []
        return self._refuse_join(
            WrongState(f"quorum {accepted.quorum.quorum_id} was revoked: {reason}; ask again"), now
        )

    def _refuse_join(self, error: LighthouseError, now: float) -> list[events.Effect]:
        return self._perform(self.ranks.refuse_join(error), now)

    def _participant(self, joined: gather.GroupJoined | None = None) -> Participant:
        me = replace(
            self.me,
            incarnation=self.incarnation,
            step=self.ranks.gather.step,
            seen_quorum_id=self.ranks.gather.quorum_id,
            watched=self.ranks.watches.is_complete,
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
            wire=self._show_handles(joined.handles),
        )

    def _listen(self, now: float) -> list[events.Effect]:
        is_silent = self.session.news_of_silence(now)
        if is_silent is None:
            return []
        silent = events.SessionSilent("it has not answered the last heartbeat")
        return [silent if is_silent else events.SessionHeard()]

    def _note_changes(self, effects: Sequence[events.Effect]) -> list[events.Effect]:
        """Of what people are told of: the missing ranks, and whether requests wait."""
        changes: list[events.Effect] = []
        missing, is_waiting = self.ranks.watches.missing, self.ranks.is_waiting
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
        """A group without ranks, or one that waits for a quorum, has nothing to finish. Where the quorum may be on its
        way already, the lighthouse says which was first: the drain is refused the join, or the group does its steps."""
        if self.ranks.gather.is_joined and self.session.is_open:
            return []
        return self._leave(now) if self.ranks.gather.waiting or not self.ranks.watches.has_ranks else []

    def _leave_if_over(self, now: float) -> list[events.Effect]:
        """While it drained its ranks have ended, and ask for nothing more."""
        return self._leave(now) if self.ranks.drains and not self.ranks.watches.has_ranks else []

    def _leave(self, now: float) -> list[events.Effect]:
        if self._has_left:
            return []
        self._has_left = True
        effects = self._perform(self.ranks.refuse_all(self._drained()), now)
        if not self.session.is_open:
            self._let_go = "it had no session to say so on"
            return effects
        messages = self.session.leave(self._draining)
        self.session.closed()
        return effects + self._send(messages)

    def _end(self) -> list[events.Effect]:
        """The lighthouse has let this manager go, and every rank knows: one that asks later would find it gone."""
        if self._has_ended or not self._let_go or self.ranks.unaware:
            return []
        self._has_ended = True
        return [events.HasLeft(self._why_over or self._let_go)]

    def _send(self, messages: Sequence[session.ToLighthouse]) -> list[events.Effect]:
        return [events.Sent(message) for message in messages]
