"""Defects of the manager, as methods that take the place of its machines' own."""

# pyright: reportPrivateUsage=false

import math
from dataclasses import replace
from typing import Any

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from lighthouse_protocol.messages.session import (
    GroupReport,
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
from manager.group import machine
from manager.group.driver import GroupDriver
from manager.group.events import PendingVote, Pushed, QuorumAnswered, QuorumRequest
from manager.group.machine import GroupMachine
from manager.group.records import ReplicaGroup
from manager.group.requests import QuorumRequests, RequestDecision, Verdict, decide_request, no_state
from manager.group.session import SessionMachine
from manager.group.votes import Votes
from tests.simulation.manager_process import ManagerProcess
from tests.simulation.museum.exhibit import Replaced
from tests.simulation.world import Process

_decide = Votes.decide
_open = Votes.open
_opened = SessionMachine.opened
_whole = SessionMachine.full_answer
_assignment = QuorumRequests.assignment
_hold = QuorumRequests.hold
_obey = QuorumRequests.obey
_enter = QuorumRequests.enter
_without_state = QuorumRequests._without_state
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


def _renew_for_ever(self: QuorumRequests, until: float) -> None:
    self._group.lease_until = self._group.renewed_until = math.inf


def _obey_any(self: QuorumRequests, order: QuorumOrder) -> bool:
    standing = self._group.standing
    return _obey(self, order if standing is None else replace(order, quorum_id=standing.quorum.quorum_id))


def _open_with_votes_of_the_same_step(self: Votes, quorum_id: int, step: int) -> None:
    old, votes = self._group.attempt, self.waiting
    _open(self, quorum_id, step)
    if old is not None and old.step == step:
        for vote in votes:
            self._group.ranks[vote.group_rank].vote = vote


def _decide_and_keep_votes(self: Votes, commit: bool) -> list[PendingVote]:
    votes = _decide(self, commit)
    for vote in votes if not commit else ():
        self._group.ranks[vote.group_rank].vote = vote
    return votes


def _assign_all_as_contributors(self: QuorumRequests, group_rank: int, init_sync: bool) -> Assignment:
    answer = _assignment(self, group_rank, init_sync)
    if not answer.catching_up:
        return answer
    size = answer.replica_world_size
    return replace(answer, catching_up=(), contributors=size, max_world_size=size, max_rank=answer.replica_rank)


def _open_without_join(self: SessionMachine, me: Participant, report: GroupReport, now: float) -> list[ToLighthouse]:
    return [message for message in _opened(self, me, report, now) if not isinstance(message, JoinRequest)]


def _join_with_whoever_has_asked(group: ReplicaGroup, request: QuorumRequest, now: float) -> RequestDecision:
    decision = decide_request(group, request, now)
    return decision._replace(verdict=Verdict.JOIN) if decision.verdict is Verdict.GATHER else decision


def _compare_what_ranks_work_at(group: ReplicaGroup, request: QuorumRequest, now: float) -> RequestDecision:
    decision, last = decide_request(group, request, now), group.ranks[request.group_rank].last_request
    if last is None or last.rank_incarnation != request.rank_incarnation:
        return decision
    if decision.verdict in (Verdict.GATHER, Verdict.JOIN) and request.step < min(last.step, group.max_step):
        error = InvalidRequest(f"of rank {request.group_rank} went from {last.step} to {request.step}", field="step")
        return RequestDecision(Verdict.REFUSE, decision.mode, error)
    return decision


def _hold_as_any(self: QuorumRequests, quorum: Quorum, step: int, *, init_sync: bool = True) -> None:
    _hold(self, quorum, step, init_sync=init_sync)
    standing = self._group.standing
    assert standing is not None
    standing.is_late, standing.mode = False, HoldState.STANDING


def _enter_late_as_up_to_date(
    self: QuorumRequests, quorum: Quorum, *, stands: bool
) -> list[QuorumAnswered] | LighthouseError:
    asks = self._group.pending(is_gathering=True)
    answers = _enter(self, quorum, stands=stands)
    if isinstance(answers, LighthouseError) or any(a.assignment.heals or a.assignment.catches_up for a in answers):
        return answers
    odd = [ask for ask in asks if ask.distrust is not None or ask.holds != asks[0].holds]
    if not odd:
        return answers
    for ask in asks:
        self._group.wait(ask, is_gathering=True)
    return no_state(asks[0], odd[0], may_heal=False)


def _give_up_instead(self: QuorumRequests, step: int | None) -> None:
    """Its ranks' ends are losses, then."""


def _release_at_once(self: GroupMachine) -> None:
    if leaving := self.watches.release():
        self.group.effects.append(Pushed(Released(), leaving))


def _without_state_or_peers(self: QuorumRequests, asks: Any, *, is_alone: bool) -> LighthouseError | None:
    return _without_state(self, asks, is_alone=False)


def _participant_watched_at_first(self: GroupMachine) -> Participant:
    me = _participant(self)
    return replace(me, watched=me.watched and self.group.incarnation == 0)


def _pause_with_its_clock(self: ManagerProcess, for_s: float) -> None:
    before = max(self.held_until, self.world.now)
    Process.pause(self, for_s)
    self._offset -= (self.held_until - before) * self.rate


NEWCOMERS_ALONE = (Replaced(SessionMachine, "full_answer", _take_newcomers_alone),)
LEASE_NEVER_ENDS = (Replaced(QuorumRequests, "renew", _renew_for_ever),)
VOTE_FOR_ANOTHER_QUORUM = (
    Replaced(Votes, "open", _open_with_votes_of_the_same_step),
    Replaced(Votes, "decide", _decide_and_keep_votes),
)


def _never_expire(self: GroupDriver, event: Any, within_s: float) -> None:
    pass


CALLS_NEVER_EXPIRE = (Replaced(GroupDriver, "_expire", _never_expire),)
CLOCK_SLEEPS = (Replaced(ManagerProcess, "pause", _pause_with_its_clock),)
HALF_A_GROUP_JOINS = (Replaced(machine, "decide_request", _join_with_whoever_has_asked),)
CATCHING_UP_CONTRIBUTES = (Replaced(QuorumRequests, "assignment", _assign_all_as_contributors),)
JOIN_LOST = (Replaced(SessionMachine, "opened", _open_without_join),)
LATE_NO_ENDS_THE_QUORUM = (Replaced(QuorumRequests, "hold", _hold_as_any),)
LATE_IS_REFUSED = (Replaced(QuorumRequests, "enter", _enter_late_as_up_to_date),)
UNWATCHED_FOR_EVER = (Replaced(GroupMachine, "_participant", _participant_watched_at_first),)
PEERS_FORGOTTEN = (Replaced(QuorumRequests, "_without_state", _without_state_or_peers),)
END_IS_A_LOSS = (Replaced(QuorumRequests, "leave", _give_up_instead),)
RELEASED_AT_ONCE = (Replaced(GroupMachine, "_release", _release_at_once),)
RETURN_REFUSED = (Replaced(machine, "decide_request", _compare_what_ranks_work_at),)
OBEYS_ANY_ORDER = (Replaced(QuorumRequests, "obey", _obey_any),)
