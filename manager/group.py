"""One replica group's manager as one machine: its ranks on one side, the lighthouse on the other. No I/O.

gather.py, grants.py, commit.py, watches.py and lighthouse_session.py hold the rules; here they meet:

1. A rank's request for a quorum is granted here, waits here, or goes to gather and from there to the lighthouse.
2. A decision of all ranks is what the next grant is built on; where all ranks want it, it carries that grant. A discard
   ends the quorum for this group, and the lighthouse is told at once.
3. A rank that is lost takes the group down: the lighthouse hears of it in the same moment, the other ranks are told
   that the quorum is revoked.
4. A group that drains does the steps that it has promised, and leaves where it would join.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from manager import commit, gather
from manager.events import (
    CallEnded,
    CallExpired,
    CallRefused,
    DrainAsked,
    Effect,
    Event,
    HasLeft,
    Killed,
    Pushed,
    QuorumAnswered,
    RankFailed,
    Received,
    Sent,
    SessionClosed,
    SessionGivenUp,
    SessionOpened,
    VoteAnswered,
    VoteCast,
    WatchEnded,
    WatchOpened,
)
from manager.grants import LEASE_SHARE, GrantMachine, Join, Wait
from manager.lighthouse_session import SessionMachine
from manager.watches import Watches
from protos.membership import Participant
from protos.refusals import Drained, LighthouseError, WrongState
from protos.session import (
    STARTING,
    DrainRequest,
    Echo,
    Goodbye,
    Handed,
    Held,
    KillRequest,
    Levels,
    Order,
    Phase,
    Refused,
    Revoked,
    ToLighthouse,
    ToManager,
    Welcome,
)


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
    ) -> None:
        """`show_handles`: how torchft's handles of the ranks are relayed to the peers. `rank_timeout_s` bounds how long
        a rank without a watch may be silent."""
        self.me = me
        self._life = life
        self._show_handles = show_handles
        self.gather = gather.GatherMachine(me.wire_id, me.group_world_size)
        self.commit = commit.CommitMachine(me.group_world_size)
        self.grants = GrantMachine(me.wire_id)
        self.watches = Watches(me.group_world_size, rank_timeout_s)
        self.session = SessionMachine(lambda: self.levels)
        self._waiting: dict[int, gather.Ask] = {}
        self._wants_next: dict[int, bool] = {}
        self._unopened: Handed | None = None
        self._draining = ""
        self._has_left = False

    @property
    def incarnation(self) -> str:
        return f"{self._life}.{self.gather.incarnation}"

    @property
    def levels(self) -> Levels:
        return Levels(self.held, bool(self._draining), self.down)

    @property
    def held(self) -> Held | None:
        return self.grants.held

    @property
    def down(self) -> str:
        """Why the group cannot take part now; empty: its ranks are there."""
        if self.watches.lost:
            return self.watches.why_lost(self.watches.lost[0])
        return STARTING if self.watches.is_starting else ""

    @property
    def ranks_waiting(self) -> tuple[int, ...]:
        return tuple(sorted({*self.gather.waiting, *self._waiting}))

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        self._hear(now)
        effects = self._dispatch(event, now)
        self._hear(now)
        return effects + self._send(self.session.tick(now))

    def tick(self, now: float) -> Sequence[Effect]:
        if self.session.is_given_up(now):
            self.session.closed()
            return [SessionGivenUp(f"the lighthouse has echoed nothing for {self.session.lease_s:g} s")]
        self._hear(now)
        effects: list[Effect] = []
        for rank in self.watches.expire(now):
            effects += self._lose(rank, now)
        return effects + self._send(self.session.tick(now))

    def deadline(self) -> float | None:
        """When to call tick next."""
        deadlines = (self.session.deadline(), self.watches.deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _hear(self, now: float) -> None:
        """A rank with a call under way is there, to the end of that call."""
        if self.watches.times_out:
            self.watches.heard((*self.ranks_waiting, *self.commit.voters), now)

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case gather.Ask():
                self.watches.asked(event.group_rank)
                self.watches.heard((event.group_rank,), now)
                return self._perform_commit(self.commit.handle(_asked(event)), now) + self._ask(event, now)
            case VoteCast(voted, wants_next):
                self.watches.heard((voted.group_rank,), now)
                self._wants_next[voted.group_rank] = wants_next
                effects = self._perform_commit(self.commit.handle(voted), now)
                for ask in self.gather.asks:
                    effects += self._perform_commit(self.commit.handle(_asked(ask)), now)
                return effects
            case CallEnded(call):
                return self._end_call(call, now)
            case CallExpired(call, error):
                return self._expire_call(call, error, now)
            case WatchOpened(watch, group_rank, worker):
                is_other = self.watches.opened(watch, group_rank, worker)
                return self._give_up(f"rank {group_rank} has restarted", now) if is_other else []
            case WatchEnded(watch):
                rank = self.watches.ended(watch)
                return [] if rank is None else self._lose(rank, now)
            case RankFailed(group_rank, worker, reason):
                return self._lose(group_rank, now) if self.watches.failed(group_rank, worker, reason) else []
            case SessionOpened():
                return [] if self._has_left else self._send(self.session.opened(self._participant(), now))
            case SessionClosed():
                self.session.closed()
                self._unopened = None  # asked for again on the next session
                if self._has_left:
                    return [HasLeft("the lighthouse is away")]
                return self._leave_if_idle(now) if self._draining else []
            case Received(message):
                return self._receive(message, now)
            case DrainAsked(reason):
                self._draining = self._draining or reason
                return self._leave_if_idle(now)

    # -- ranks

    def _lose(self, group_rank: int, now: float) -> list[Effect]:
        """What it still asks for is void: it would stand for a rank that is not there."""
        gone = WrongState(self.watches.why_lost(group_rank))
        effects: list[Effect] = []
        if (ask := self._waiting.pop(group_rank, None)) is not None:
            effects.append(CallRefused(ask.call, gone))
        if (call := self.gather.call_of(group_rank)) is not None:
            effects += self._perform_gather(self.gather.handle(gather.Withdrawn(call)), now)
            effects.append(CallRefused(call, gone))
        effects += self._perform_commit(self.commit.handle(commit.RankLost(group_rank)), now)
        return effects + self._give_up(str(gone), now)

    def _ask(self, ask: gather.Ask, now: float) -> list[Effect]:
        decision = self.grants.decide(ask, now)
        if isinstance(decision, Wait):
            older = self._waiting.get(ask.group_rank)
            self._waiting[ask.group_rank] = ask
            return [] if older is None else [CallRefused(older.call, gather.superseded(ask.group_rank))]
        if isinstance(decision, Join):
            if self._draining:
                return [CallRefused(ask.call, self._drained()), *self._leave(now)]
            effects = self._push_revoked(f"rank {ask.group_rank} cannot go on with it") if decision.gives_up else []
            return effects + self._perform_gather(self.gather.handle(ask), now)
        effects = self._open_step() if decision.is_first else []
        return [*effects, QuorumAnswered(ask.call, decision.assignment, None)]

    def _open_step(self) -> list[Effect]:
        held = self.grants.held
        assert held is not None
        self._wants_next = {}
        return self._refusals(self.commit.handle(commit.Opened(held.quorum_id, held.granted)))

    def _end_call(self, call: int, now: float) -> list[Effect]:
        self._waiting = {rank: ask for rank, ask in self._waiting.items() if ask.call != call}
        effects = self._perform_gather(self.gather.handle(gather.Withdrawn(call)), now)
        self.commit.handle(commit.Withdrawn(call))
        return effects

    def _expire_call(self, call: int, error: LighthouseError, now: float) -> list[Effect]:
        """A join is over for all ranks with the first one's time, and for the same reason."""
        was_joined = self.gather.is_joined
        effects = self._end_call(call, now)
        if was_joined and not self.gather.is_joined:
            effects += self._perform_gather(self.gather.refuse_all(error), now)
        return effects

    def _perform_gather(self, effects: Sequence[gather.Effect], now: float) -> list[Effect]:
        performed: list[Effect] = []
        for effect in effects:
            match effect:
                case gather.GroupJoined():
                    participant = self._participant(effect)
                    performed += self._send(self.session.join(participant, effect.deadline_at, now))
                case gather.JoinTakenBack():
                    performed += self._send(self.session.withdraw())
                case gather.RoundAnswered(quorum_id, step):
                    self._wants_next = {}
                    performed += self._refusals(self.commit.handle(commit.Opened(quorum_id, step)))
                case gather.RankAnswered(call, assignment, quorum):
                    performed.append(QuorumAnswered(call, assignment, quorum))
                case gather.RankRefused(call, error):
                    performed.append(CallRefused(call, error))
        return performed

    def _perform_commit(self, effects: Sequence[commit.Effect], now: float) -> list[Effect]:
        decided = [effect for effect in effects if isinstance(effect, commit.Decided)]
        performed = self._refusals(effects)
        if not decided:
            return performed
        fresh = self.commit.take_fresh()
        offers = False
        if fresh is not None and fresh.commit:
            offers = self._committed(fresh, now)
            performed += self._open_step() if offers else []
        elif fresh is not None and self.grants.held is not None and self.grants.held.quorum_id == fresh.quorum_id:
            performed += self._give_up("a step was discarded", now)
        for effect in decided:
            grant = self.grants.assignment(effect.group_rank, True) if offers else None
            performed.append(VoteAnswered(effect.call, effect.commit, grant))
        return performed

    def _committed(self, decision: commit.Decision, now: float) -> bool:
        """Whether the ranks are let into the next step with the same answer."""
        self.grants.committed(decision.quorum_id, decision.step)
        wants = len(self._wants_next) == self.me.group_world_size and all(self._wants_next.values())
        return wants and not self._draining and self.grants.offer(now)

    def _refusals(self, effects: Sequence[commit.Effect]) -> list[Effect]:
        return [CallRefused(e.call, e.error) for e in effects if isinstance(e, commit.VoteRefused)]

    def _give_up(self, reason: str, now: float) -> list[Effect]:
        """This group ends the quorum that it holds: the other ranks are to abort what has not completed."""
        if self.grants.held is None or not self.grants.give_up():
            return []
        return self._push_revoked(reason) + self._decide_again(now)

    def _push_revoked(self, reason: str) -> list[Effect]:
        held = self.grants.held
        return [] if held is None else [Pushed(Revoked(held.quorum_id, reason), self.watches.all())]

    # -- the lighthouse

    def _receive(self, message: ToManager, now: float) -> list[Effect]:
        match message:
            case Welcome(_, _, order):
                self.session.welcomed(message, now)
                return self._obey(order, now)
            case Echo(_, _, order):
                sent_at = self.session.echoed(message, now)
                effects = self._obey(order, now)
                if sent_at is not None:
                    self.grants.renew(sent_at + LEASE_SHARE * self.session.lease_s)
                return effects + self._open(now) + self._decide_again(now)
            case Handed(join):
                if not self.session.is_waiting(join):
                    return []
                self._unopened = message
                return self._open(now)
            case Refused(join, error):
                is_ours = self.session.answered(join) if join else self.gather.is_joined
                effects = self._refuse_join(error, now) if is_ours else []
                return effects + (self._leave(now) if is_ours and self._draining else [])
            case Order():
                return self._obey(message, now)
            case DrainRequest(reason):
                return self._dispatch(DrainAsked(reason or "the lighthouse was asked to drain it"), now)
            case KillRequest(reason):
                return [Killed(reason)]
            case Goodbye(reason):
                return [HasLeft(reason)] if self._has_left else []

    def _obey(self, order: Order | None, now: float) -> list[Effect]:
        if order is None:
            return []
        if self.grants.obey(order):
            return self._push_revoked(order.reason) + self._decide_again(now)
        if (
            self._unopened is not None
            and order.phase is Phase.REVOKED
            and order.quorum_id == self._unopened.quorum.quorum_id
        ):
            return self._drop_unopened(order.reason, now)
        return self._decide_again(now)

    def _decide_again(self, now: float) -> list[Effect]:
        """The first rank's request decides for the step; so all that wait are looked at again."""
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for ask in waiting.values():
            effects += self._ask(ask, now)
        return effects

    def _open(self, now: float) -> list[Effect]:
        """Let the ranks into the step that a quorum was formed for: a grant like any other, under a valid lease."""
        handed = self._unopened
        if handed is None or (handed.stands and now >= self.grants.renewed_until):
            return []
        self._unopened = None
        if not self.session.answered(handed.join):  # taken back since
            return []
        answered = self.gather.handle(gather.QuorumReceived(self.gather.round, handed.quorum))
        is_taken = any(isinstance(effect, gather.RoundAnswered) for effect in answered)
        if is_taken and handed.stands:
            self.grants.take(handed.quorum, self.gather.max_step)
        elif is_taken:
            self.grants.drop()
        return self._perform_gather(answered, now)

    def _drop_unopened(self, reason: str, now: float) -> list[Effect]:
        handed, self._unopened = self._unopened, None
        if handed is None or not self.session.answered(handed.join):
            return []
        return self._refuse_join(WrongState(f"quorum {handed.quorum.quorum_id} was revoked: {reason}; ask again"), now)

    def _refuse_join(self, error: LighthouseError, now: float) -> list[Effect]:
        return self._perform_gather(self.gather.handle(gather.JoinFailed(self.gather.round, error)), now)

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
            wire=self._show_handles(joined.handles),
        )

    # -- leaving

    def _drained(self) -> Drained:
        return Drained(f"{self.me.replica_id} leaves: {self._draining}")

    def _leave_if_idle(self, now: float) -> list[Effect]:
        """A group without ranks, or one that waits for a quorum, has nothing to finish. Where the quorum may be on its
        way already, the lighthouse says which was first: the drain is refused the join, or the group does its steps."""
        if self.gather.is_joined and self.session.is_open:
            return []
        return self._leave(now) if self.gather.waiting or not self.watches.has_ranks else []

    def _leave(self, now: float) -> list[Effect]:
        if self._has_left:
            return []
        self._has_left = True
        effects = self._perform_gather(self.gather.refuse_all(self._drained()), now)
        if not self.session.is_open:
            return [*effects, HasLeft("the lighthouse is away")]
        messages = self.session.leave(self._draining)
        self.session.closed()
        return effects + self._send(messages)

    def _send(self, messages: Sequence[ToLighthouse]) -> list[Effect]:
        return [Sent(message) for message in messages]


def _asked(ask: gather.Ask) -> commit.Asked:
    return commit.Asked(ask.group_rank, ask.step, ask.tag_quorum_id, ask.commit_failures > 0)
