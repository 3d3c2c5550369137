"""Defects of the lighthouse, as methods that take the place of its machines' own."""

# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lighthouse.job import forming
from lighthouse.job.driver import JobDriver
from lighthouse.job.events import Left, QuorumEffect, QuorumFormed, SessionEnded
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.lineage import Claim, Numbering
from lighthouse.job.presence import MassSilence, Presence
from lighthouse.job.records import Group, QuorumRecord
from lighthouse.job.registry import JobRegistry
from lighthouse.job.roster import Job, JoinQueue
from lighthouse.job.standing import Standing
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError
from tests.simulation.lighthouse_site import FIRST_WALL_S, Lighthouse
from tests.simulation.museum.exhibit import Replaced

_take_place = Presence._take_place
_number = Numbering.number
_expire = Job.expire
_claim = forming._claim
_free_at = Standing.free_at
_perform_one = JobDriver._perform_one
_remember = JobRegistry.remember


def _no_refusal(self: Presence, *_: Any, **__: Any) -> None:
    return None


def _by_incarnation(self: Presence, participant: Participant, *_: Any) -> LighthouseError | None:
    old = self._job.groups.get(participant.replica_id)
    if old is None or not old.is_connected or old.incarnation == participant.incarnation:
        return None
    return DuplicateReplica(f"{participant.replica_id} is in use")


def _end_as_leave(self: Presence, event: SessionEnded, now: float) -> None:
    self.leave(Left(event.session), now)


def _keep_old_session(self: Presence, participant: Participant, now: float) -> None:
    old = self._job.groups.get(participant.replica_id)
    session = old.session if old is not None else None
    _take_place(self, participant, now)
    if old is not None and session is not None and old.incarnation == participant.incarnation:
        self._sessions[session] = old


def _end_any_session(self: Presence, event: SessionEnded, now: float) -> None:
    member = self._sessions.pop(event.session, None)
    if member is not None:
        self._lose(member, "its connection was lost", now)


def _judge_each_alone(self: MassSilence, now: float) -> None:
    self._is_judged = True


def _end_unnoticed(self: Presence, event: SessionEnded, now: float) -> None:
    """Nothing follows from it."""


def _keep_waiting(self: JoinQueue, replica_id: str, call: int, now: float) -> None:
    """A call that has ended waits on."""


def _free_at_once(self: Standing, chosen: Iterable[Participant] = ()) -> float:
    return 0.0 if chosen else _free_at(self)


def _free_by_name(self: Standing, chosen: Iterable[Participant] = ()) -> float:
    return 0.0 if any(p.replica_id in self.leases for p in chosen) else _free_at(self)


def _free_with_any_member(self: Standing, chosen: Iterable[Participant] = ()) -> float:
    """As if all were heard of."""
    if any(self.is_holder(p.replica_id, p.incarnation) for p in chosen):
        return 0.0
    return max((lease.until for lease in self.leases.values()), default=0.0)


def _take_place_and_lease(self: Presence, participant: Participant, now: float) -> None:
    old = self._job.groups.get(participant.replica_id)
    _take_place(self, participant, now)
    if old is not None and old.incarnation != participant.incarnation:
        self.standing.end_lease(old.replica_id, old.incarnation)


def _resume_at_lowest(self: Standing) -> QuorumOrder | None:
    told = [holder.granted for holder in self.leases.values() if holder.granted is not None]
    if self.phase is not QuorumPhase.RECALLED or len(told) < len(self.leases):
        return None
    self.upto, self.phase = min(told), QuorumPhase.RESUMED
    return self.order()


def _resume_at_highest(self: Standing) -> QuorumOrder | None:
    told = [holder.granted for holder in self.leases.values() if holder.granted is not None]
    if self.phase is not QuorumPhase.RECALLED or len(told) < len(self.leases):
        return None
    self.upto = max(told)
    if any(holder.is_spent and (holder.granted or 0) < self.upto for holder in self.leases.values()):
        return self.revoke("one of them cannot do that step any more")
    self.phase = QuorumPhase.RESUMED
    return self._end_when_done() or self.order()


def _keep_id(self: Numbering, chosen: list[Group], seen_id: int, *, are_same: bool, always: bool) -> bool:
    return _number(self, chosen, seen_id, are_same=are_same, always=False)


def _forget_seen_ids(self: Numbering, chosen: list[Group], seen_id: int, *, are_same: bool, always: bool) -> bool:
    return _number(self, chosen, 0, are_same=are_same, always=always)


def _recall_for_anybody(self: QuorumMachine) -> None:
    if self.standing.phase is not QuorumPhase.STANDING:
        return
    draining = self.presence.draining()
    if draining:
        self.presence.recall(f"{draining[0]} drains")
    elif self.joins.newcomers:
        self.presence.recall(f"{self.joins.newcomers} waiting to join")


def _waiting_since_anyones_join(self: JoinQueue, now: float, *, of_members: bool) -> float | None:
    return self.anyone.running_since(now)


def _expire_and_remember(self: Job, now: float) -> list[Group]:
    with_all = dict(self.groups)
    lapsed = _expire(self, now)
    self.groups = with_all
    return lapsed


def _tag_alone_counts(job: Job, member: Group, participant: Participant) -> Claim:
    return replace(_claim(job, member, participant), may_be_ahead=None)


def _no_other_is_ahead(job: Job, member: Group, participant: Participant) -> Claim:
    claim = _claim(job, member, participant)
    return replace(claim, may_be_ahead=claim.may_be_ahead and 0)


def _tell_then_write(self: JobDriver, effect: QuorumEffect) -> None:
    if isinstance(effect, QuorumFormed) and effect.record is not None:
        _perform_one(self, replace(effect, record=None))
        self._remember(effect.record)
    else:
        _perform_one(self, effect)


def _wait_for_own_lease(self: JobRegistry, records: Mapping[str, QuorumRecord]) -> None:
    _remember(self, {job: replace(record, lease_s=0.0) for job, record in records.items()})


def _same_wall(self: Lighthouse) -> float:
    return FIRST_WALL_S


def _wall_set_back(self: Lighthouse) -> float:
    return FIRST_WALL_S - 1000 * self.starts


CLOSINGS_ALONE = (Replaced(MassSilence, "_judge", _judge_each_alone),)
END_IS_A_LEAVE = (Replaced(Presence, "end", _end_as_leave),)
OLD_SESSION_ENDS_NEWER = (
    Replaced(Presence, "_take_place", _keep_old_session),
    Replaced(Presence, "end", _end_any_session),
)
END_UNNOTICED = (Replaced(Presence, "end", _end_unnoticed),)
ENDED_CALL_WAITS = (Replaced(JoinQueue, "withdraw", _keep_waiting),)
FREE_AT_ONCE = (Replaced(Standing, "free_at", _free_at_once),)
ANOTHER_SESSION_ENDS_THE_LEASE = (Replaced(Presence, "_take_place", _take_place_and_lease),)
FREE_WHILE_ONE_IS_AWAY = (Replaced(Standing, "free_at", _free_with_any_member),)
FREE_BY_NAME = (Replaced(Standing, "free_at", _free_by_name),)
RESUMED_TOO_LOW = (Replaced(Standing, "_settle", _resume_at_lowest),)
ENDED_FOR_A_LATER_GRANT = (Replaced(Standing, "_settle", _resume_at_highest),)
SAME_ID_AGAIN = (Replaced(Numbering, "number", _keep_id),)
WRITTEN_AFTER_TELLING = (Replaced(JobDriver, "_perform_one", _tell_then_write),)
ID_REUSED = (
    Replaced(Lighthouse, "wall", _same_wall),
    Replaced(Numbering, "number", _forget_seen_ids),
)
ID_GOES_BACK = (
    Replaced(Lighthouse, "wall", _wall_set_back),
    Replaced(Numbering, "number", _forget_seen_ids),
)
SHORTER_LEASE = (Replaced(JobRegistry, "remember", _wait_for_own_lease),)
RECALL_FOR_NOTHING = (Replaced(QuorumMachine, "_review", _recall_for_anybody),)
NEWCOMERS_CLOCK = (Replaced(JoinQueue, "waiting_since", _waiting_since_anyones_join),)
NOBODY_FORGOTTEN = (Replaced(Job, "expire", _expire_and_remember),)
TAG_ALONE_COUNTS = (Replaced(forming, "_claim", _tag_alone_counts),)
NO_OTHER_IS_AHEAD = (Replaced(forming, "_claim", _no_other_is_ahead),)
ANYBODY_IS_ADMITTED = (Replaced(Presence, "_refusal", _no_refusal),)
IMPOSTOR_IS_TAKEN = (Replaced(Presence, "_impostor", _by_incarnation),)
