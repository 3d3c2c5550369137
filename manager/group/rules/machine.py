"""One replica group's manager as one machine: its ranks on one side, the lighthouse on the other. No I/O.

ranks.py and lighthouse_session.py hold the rules of the two sides; here they meet:

1. What the ranks' side joins and takes back is said on the session; what comes by that goes to the ranks.
2. Ranks are let into the step that a quorum was formed for only under a valid lease.
3. What the lighthouse waits for (the quorum given up, a rank lost) it hears in the same moment.
4. A group that drains does the steps that it has promised, and leaves where it would join.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant, World
from lighthouse_protocol.refusals import Drained, LighthouseError, WrongState
from manager.group.rules import events, gather, ranks
from manager.group.rules.grants import LEASE_SHARE
from manager.group.rules.lighthouse_session import SessionMachine
from manager.group.rules.progress import ProgressReporter
from manager.group.rules.status import GroupStatus, say_missing

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
        self.ranks = ranks.Ranks(me.wire_id, me.group_world_size, rank_timeout_s)
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

    def _perform(self, effects: Sequence[ranks.Effect], now: float) -> list[events.Effect]:
        """What the ranks' side does to the group's join is said to the lighthouse; the rest is for the driver."""
        performed: list[events.Effect] = []
        for effect in effects:
            match effect:
                case gather.GroupJoined():
                    performed += self._send(self.session.join(self._participant(effect), effect.deadline_at, now))
                case gather.JoinTakenBack():
                    performed += self._send(self.session.withdraw())
                case ranks.EndReached(call):
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
