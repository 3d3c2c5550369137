"""Defects of the manager, as methods that take the place of its machines' own."""

# pyright: reportPrivateUsage=false

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from lighthouse_protocol.messages.session import (
    HoldState,
    JoinAccepted,
    JoinRequest,
    QuorumChanged,
    QuorumOrder,
    Released,
    ToLighthouse,
)
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_protocol.rules.quorum_change import NamedQuorum
from manager.group import events
from manager.group import votes as commit
from manager.group.driver import GroupDriver
from manager.group.events import CallRefused, Pushed, QuorumAnswered
from manager.group.machine import GroupMachine
from manager.group.records import PendingVote, QuorumRequest
from manager.group.requests import (
    Effect,
    GatherMachine,
    GrantMachine,
    GroupJoined,
    no_state,
)
from manager.group.session import SessionMachine
from manager.group.votes import CommitMachine
from tests.simulation.manager_process import ManagerProcess
from tests.simulation.museum.exhibit import Replaced
from tests.simulation.world import Process

_decide = CommitMachine._decide
_open = CommitMachine._open
_opened = SessionMachine.opened
_whole = SessionMachine.whole
_ask = GatherMachine.ask
_assignment = GrantMachine.assignment
_take = GrantMachine.take
_obey = GrantMachine.obey
_receive = GatherMachine._receive
_without_state = GatherMachine._without_state
_participant = GroupMachine._participant


def _take_newcomers_alone(self: SessionMachine, told: JoinAccepted | QuorumChanged) -> JoinAccepted | None:
    if isinstance(told, JoinAccepted):
        return _whole(self, told)
    assert self.known is not None
    new = {member.wire_id: member for member in told.change.members}
    members = {member.wire_id: member for member in self.known.quorum.participants} | new
    quorum = Quorum(told.change.quorum_id, tuple(members[name] for name in sorted(members)))
    self.known = replace(NamedQuorum.of(quorum), digest=told.change.digest)
    return JoinAccepted(told.join, quorum, told.stands, told.secret)


def _renew_for_ever(self: GrantMachine, until: float) -> None:
    self.lease_until = self.renewed_until = math.inf


def _obey_any(self: GrantMachine, order: QuorumOrder) -> bool:
    held = self.held
    return _obey(self, order if held is None else replace(order, quorum_id=held.quorum_id))


def _open_with_votes_of_the_same_step(self: CommitMachine, attempt: Any) -> Sequence[commit.Effect]:
    old, votes = self._attempt, self.votes
    effects = _open(self, attempt)
    if old is not None and old.step == attempt.step:
        _keep(self, votes)
    return effects


def _decide_and_keep_votes(self: CommitMachine, attempt: Any, commits: bool) -> Sequence[commit.Effect]:
    votes = self.votes
    effects = _decide(self, attempt, commits)
    if not commits:
        _keep(self, votes)
    return effects


def _keep(self: CommitMachine, votes: Sequence[PendingVote]) -> None:
    for vote in votes:
        self._group.ranks[vote.group_rank].vote = vote


def _assign_all_as_contributors(self: GrantMachine, group_rank: int, init_sync: bool) -> Assignment:
    answer = _assignment(self, group_rank, init_sync)
    if not answer.catching_up:
        return answer
    size = answer.replica_world_size
    return replace(answer, catching_up=(), contributors=size, max_world_size=size, max_rank=answer.replica_rank)


def _open_without_join(self: SessionMachine, me: Participant, now: float) -> list[ToLighthouse]:
    return [message for message in _opened(self, me, now) if not isinstance(message, JoinRequest)]


def _join_with_whoever_has_asked(self: GatherMachine, ask: QuorumRequest) -> list[Effect]:
    effects = _ask(self, ask)
    return effects if self.is_joined or not self.asks else effects + self._join()


def _compare_what_ranks_work_at(self: GatherMachine, ask: QuorumRequest) -> None:
    last = self._group.ranks[ask.group_rank].last_request
    if last is None or last.rank_incarnation != ask.rank_incarnation:
        return
    if ask.step < min(last.step, self._max_step if self._max_step is not None else last.step):
        raise InvalidRequest(f"of rank {ask.group_rank} went from {last.step} back to {ask.step}", field="step")


def _take_as_any(self: GrantMachine, quorum: Quorum, step: int, *, init_sync: bool = True) -> None:
    _take(self, quorum, step, init_sync=init_sync)
    self._is_late, self.mode = False, HoldState.STANDING


def _receive_late_as_up_to_date(self: GatherMachine, quorum: Quorum, stands: bool) -> list[Effect]:
    effects = _receive(self, quorum, stands)
    answers = [effect for effect in effects if isinstance(effect, QuorumAnswered)]
    if any(answer.assignment.heals or answer.assignment.catches_up for answer in answers):
        return effects
    asks = [ask for rank in self._group.ranks if (ask := rank.last_request) is not None][: len(answers)]
    odd = [ask for ask in asks if ask.distrust is not None or ask.holds != asks[0].holds]
    return [CallRefused(ask.call, no_state(asks[0], odd[0], may_heal=False)) for ask in asks] if odd else effects


def _give_up_instead(self: GrantMachine, step: int | None) -> None:
    """Its ranks' ends are losses, then."""


def _release_at_once(self: GroupMachine) -> list[events.Effect]:
    leaving = self.watches.release()
    return [Pushed(Released(), leaving)] if leaving else []


def _without_state_or_peers(self: GatherMachine, *, is_alone: bool) -> LighthouseError | None:
    return _without_state(self, is_alone=False)


def _participant_watched_at_first(self: GroupMachine, joined: GroupJoined | None = None) -> Participant:
    me = _participant(self, joined)
    return replace(me, watched=me.watched and self.gather.incarnation == 0)


def _pause_with_its_clock(self: ManagerProcess, for_s: float) -> None:
    before = max(self.held_until, self.world.now)
    Process.pause(self, for_s)
    self._offset -= (self.held_until - before) * self.rate


NEWCOMERS_ALONE = (Replaced(SessionMachine, "whole", _take_newcomers_alone),)
LEASE_NEVER_ENDS = (Replaced(GrantMachine, "renew", _renew_for_ever),)
VOTE_FOR_ANOTHER_QUORUM = (
    Replaced(CommitMachine, "_open", _open_with_votes_of_the_same_step),
    Replaced(CommitMachine, "_decide", _decide_and_keep_votes),
)


def _never_expire(self: GroupDriver, call: int, why: Any, within_s: float) -> None:
    pass


CALLS_NEVER_EXPIRE = (Replaced(GroupDriver, "_expire", _never_expire),)
CLOCK_SLEEPS = (Replaced(ManagerProcess, "pause", _pause_with_its_clock),)
HALF_A_GROUP_JOINS = (Replaced(GatherMachine, "ask", _join_with_whoever_has_asked),)
CATCHING_UP_CONTRIBUTES = (Replaced(GrantMachine, "assignment", _assign_all_as_contributors),)
JOIN_LOST = (Replaced(SessionMachine, "opened", _open_without_join),)
LATE_NO_ENDS_THE_QUORUM = (Replaced(GrantMachine, "take", _take_as_any),)
LATE_IS_REFUSED = (Replaced(GatherMachine, "_receive", _receive_late_as_up_to_date),)
UNWATCHED_FOR_EVER = (Replaced(GroupMachine, "_participant", _participant_watched_at_first),)
PEERS_FORGOTTEN = (Replaced(GatherMachine, "_without_state", _without_state_or_peers),)
END_IS_A_LOSS = (Replaced(GrantMachine, "leave", _give_up_instead),)
RELEASED_AT_ONCE = (Replaced(GroupMachine, "_release", _release_at_once),)
RETURN_REFUSED = (Replaced(GatherMachine, "_check_step", _compare_what_ranks_work_at),)
OBEYS_ANY_ORDER = (Replaced(GrantMachine, "obey", _obey_any),)
