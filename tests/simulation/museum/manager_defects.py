"""Defects of the manager, as methods that take the place of its machines' own."""

# pyright: reportPrivateUsage=false

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manager import commit
from manager.ask import Ask
from manager.commit import CommitMachine
from manager.gather import Effect, GatherMachine
from manager.grants import GrantMachine
from manager.lighthouse_session import SessionMachine
from protos.membership import Assignment, Participant
from protos.refusals import InvalidRequest
from protos.session import JoinRequest, ToLighthouse
from tests.simulation.museum.exhibit import Replaced

_decide = CommitMachine._decide
_open = CommitMachine._open
_opened = SessionMachine.opened
_ask = GatherMachine._ask
_assignment = GrantMachine.assignment


def _renew_for_ever(self: GrantMachine, until: float) -> None:
    self.lease_until = self.renewed_until = math.inf


def _open_with_votes_of_the_same_step(self: CommitMachine, attempt: Any) -> Sequence[commit.Effect]:
    old = self._attempt
    effects = _open(self, attempt)
    if old is not None and old.step == attempt.step:
        attempt.yes = dict(old.yes)
    return effects


def _decide_and_keep_votes(self: CommitMachine, attempt: Any, commits: bool) -> Sequence[commit.Effect]:
    yes = attempt.yes
    effects = _decide(self, attempt, commits)
    attempt.yes = {} if commits else yes
    return effects


def _assign_all_as_contributors(self: GrantMachine, group_rank: int, init_sync: bool) -> Assignment:
    answer = _assignment(self, group_rank, init_sync)
    if not answer.catching_up:
        return answer
    size = answer.replica_world_size
    return replace(answer, catching_up=(), contributors=size, max_world_size=size, max_rank=answer.replica_rank)


def _open_without_join(self: SessionMachine, me: Participant, now: float) -> list[ToLighthouse]:
    return [message for message in _opened(self, me, now) if not isinstance(message, JoinRequest)]


def _join_with_whoever_has_asked(self: GatherMachine, ask: Ask) -> list[Effect]:
    effects = _ask(self, ask)
    return effects if self._is_joined or not self._asks else effects + self._join()


def _compare_what_ranks_work_at(self: GatherMachine, ask: Ask) -> None:
    last = self._last.get(ask.group_rank)
    if last is None or last.worker != ask.worker:
        return
    if ask.step < min(last.step, self._max_step if self._max_step is not None else last.step):
        raise InvalidRequest(f"of rank {ask.group_rank} went from {last.step} back to {ask.step}", field="step")


LEASE_NEVER_ENDS = (Replaced(GrantMachine, "renew", _renew_for_ever),)
VOTE_FOR_ANOTHER_QUORUM = (
    Replaced(CommitMachine, "_open", _open_with_votes_of_the_same_step),
    Replaced(CommitMachine, "_decide", _decide_and_keep_votes),
)
HALF_A_GROUP_JOINS = (Replaced(GatherMachine, "_ask", _join_with_whoever_has_asked),)
CATCHING_UP_CONTRIBUTES = (Replaced(GrantMachine, "assignment", _assign_all_as_contributors),)
JOIN_LOST = (Replaced(SessionMachine, "opened", _open_without_join),)
RETURN_REFUSED = (Replaced(GatherMachine, "_check_step", _compare_what_ranks_work_at),)
