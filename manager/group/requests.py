"""Rules for the ranks' requests for a quorum. This module does no I/O.

A rank requests a quorum before each step. If the manager can, it answers from the standing quorum with a *grant*, the
permission to enter the next step. Otherwise the group *joins*: it combines the requests of all its ranks into one
request to the lighthouse for the next quorum. `decide_request` decides which. `QuorumRequests` combines the ranks'
requests into one join and stores the standing quorum. `assign` computes a rank's part in a quorum: its index among the
contributors, and its sources and targets if states must be copied.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from lighthouse_protocol.messages.session import HoldState, QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import (
    InternalError,
    InvalidRequest,
    LighthouseError,
    Unrecoverable,
    WrongState,
)
from manager.group.events import PendingVote, QuorumAnswered, QuorumRequest
from manager.group.records import GRANTING, Rank, ReplicaGroup, StandingQuorum


def check_rank(group_rank: int, group_world_size: int) -> None:
    if not 0 <= group_rank < group_world_size:
        raise unknown_rank_error(group_rank, group_world_size)


def unknown_rank_error(group_rank: int, group_world_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"is {group_rank}; the group has ranks 0 to {group_world_size - 1} (--group-world-size)", field="rank"
    )


def _step_mismatch_error(ask: QuorumRequest, other: QuorumRequest) -> Unrecoverable:
    return Unrecoverable(
        f"step: rank {ask.group_rank} is at step {ask.step} and rank {other.group_rank} at {other.step}; the ranks of "
        "a group advance together: restart the group, or load one checkpoint in all its ranks"
    )


def missing_state_error(ask: QuorumRequest, other: QuorumRequest, *, may_heal: bool) -> LighthouseError:
    """Return the error for ranks that must heal while no other group can provide the state.

    The reason is that `ask` and `other` hold different states, or that the state of `other` is unusable. `may_heal`
    means that a peer with the state may still return. The error is then WrongState, so that the ranks request a quorum
    again. Otherwise the error is Unrecoverable.
    """
    torn = other.distrust
    what = f"{torn.text if torn is not None else _describe_difference(ask, other)}, and no other group can heal them"
    if may_heal:
        return WrongState(f"step: {what} at the moment; retry until one returns")
    what_to_do = "load one checkpoint in all its ranks" if torn is None else "the job from its last checkpoint"
    return Unrecoverable(f"step: {what}: restart the group, or {what_to_do}")


def _describe_difference(ask: QuorumRequest, other: QuorumRequest) -> str:
    held, other_held = ask.holds, other.holds
    return (
        f"rank {ask.group_rank} holds step {held.step} of quorum {held.quorum_id} and rank {other.group_rank} step "
        f"{other_held.step} of quorum {other_held.quorum_id}"
    )


MAX_OTHER_SOURCES = 4


def assign(
    quorum: Quorum, wire_id: str, group_rank: int, init_sync: bool, *, stands: bool = False
) -> Assignment | None:
    """Compute a rank's assignment in a quorum, or return None if `wire_id` is not a participant.

    All managers of a quorum, including torchft's, must compute the same result.

    1. Participants whose step is below `max_step` heal. At step 0 with `init_sync`, all participants heal from one of
       them (`_initial_source`).
    2. If n participants are up to date, the i-th participant that heals (from 0) copies the state from number
       (i + group_rank) mod n of these n. The next MAX_OTHER_SOURCES of them are its replacement sources.
    3. A participant that heals contributes to the same step if every participant supports this (`heals_first` is not
       None) and it heals before it computes. If it would heal too late for that, it gets no source, contributes zeros
       to this step, and heals under another quorum, which then follows after one step (`is_for_one_step`).
    4. If the quorum stands, a participant with `catch_up` heals while the others continue to train. It contributes
       nothing until the next quorum. It gets a source only if it does not already have one (`has_source`).

    Args:
        quorum: The quorum.
        wire_id: This group's id in the quorum.
        group_rank: The rank within its group.
        init_sync: Whether all participants copy one state at step 0.
        stands: Whether the quorum is a standing one, which may last for many steps.
    """
    members = quorum.participants
    mine = next((i for i, member in enumerate(members) if member.wire_id == wire_id), None)
    if mine is None:
        return None
    max_step, at_max = _at_max(members)
    primary = at_max[group_rank % len(at_max)]
    behind = _behind(members, group_rank, init_sync)
    all_report = _all_report_heals_first(members)
    catching_up, healing, copying = list[int](), list[int](), list[int]()
    for i in behind:
        if _is_catching_up(members[i], max_step, stands=stands):
            catching_up.append(i)
            if not members[i].has_source:
                copying.append(i)
        elif members[i].heals_first or not all_report:
            healing.append(i)
            copying.append(i)
    sources = sorted(set(range(len(members))).difference(behind))
    contributors = sorted(sources + healing) if all_report else sources
    source_of = {target: (n + group_rank) % len(sources) for n, target in enumerate(copying)}
    answer = Assignment(
        quorum_id=quorum.quorum_id,
        replica_rank=mine,
        replica_world_size=len(members),
        replica_ids=tuple(member.wire_id for member in members),
        store_address=members[primary].store_address,
        max_step=max_step,
        max_rank=at_max.index(mine) if mine in at_max else None,
        max_world_size=len(at_max),
        contributors=len(contributors),
        primary_address=members[primary].address,
        serve_to=tuple(target for target, place in source_of.items() if sources[place] == mine),
        commit_failures=max(member.commit_failures for member in members),
        catching_up=tuple(catching_up),
        tag_quorum_id=members[at_max[0]].tag_quorum_id,
        compares=all(member.compares for member in members),
        place=contributors.index(mine) if mine in contributors else None,
        healing=tuple(healing),
    )
    if mine not in source_of:
        return answer
    first, *others = (sources[source_of[mine] :] + sources[: source_of[mine]])[: 1 + MAX_OTHER_SOURCES]
    return replace(
        answer,
        heal_from_rank=first,
        heal_from_address=members[first].address,
        other_sources=tuple(members[other].address for other in others),
    )


def is_for_one_step(quorum: Quorum, init_sync: bool, group_world_size: int) -> bool:
    """Return whether this standing quorum must be replaced after its first step.

    This is the case if a participant is behind but cannot heal before it computes, so it must heal under the next
    quorum. All managers must compute the same result. For `init_sync` see `assign`. `group_world_size` is the number of
    ranks per group.
    """
    members = quorum.participants
    if not _all_report_heals_first(members):
        return False
    max_step, _ = _at_max(members)
    ranks = range(group_world_size if max_step == 0 else 1)  # the ranks differ only at step 0
    behind = {i for group_rank in ranks for i in _behind(members, group_rank, init_sync)}
    return any(not members[i].heals_first and not _is_catching_up(members[i], max_step, stands=True) for i in behind)


def _at_max(members: tuple[Participant, ...]) -> tuple[int, list[int]]:
    max_step = max(member.step for member in members)
    return max_step, [i for i, member in enumerate(members) if member.step == max_step]


def _all_report_heals_first(members: tuple[Participant, ...]) -> bool:
    return all(member.heals_first is not None for member in members)


def _is_catching_up(member: Participant, max_step: int, *, stands: bool) -> bool:
    return stands and member.catch_up and member.step < max_step


def _initial_source(members: tuple[Participant, ...], at_max: list[int], group_rank: int) -> int:
    """Return the index of the participant whose state all others copy at step 0.

    torchft selects a different participant for each group_rank. If all participants send tags (Agents do), all ranks
    copy from the same one, so that the ranks in a group hold parts of one model. A group whose ranks hold different
    states sends no tag either. Such a group is selected only if there is no other candidate. `at_max` contains the
    indices of the candidates.
    """
    if any(member.tag_quorum_id is None and not member.ranks_disagree for member in members):
        return at_max[group_rank % len(at_max)]
    return next((i for i in at_max if not members[i].ranks_disagree), at_max[0])


def _behind(members: tuple[Participant, ...], group_rank: int, init_sync: bool) -> list[int]:
    max_step, at_max = _at_max(members)
    only_source = _initial_source(members, at_max, group_rank) if init_sync and max_step == 0 else None
    return [
        i
        for i, member in enumerate(members)
        if member.step != max_step or (only_source is not None and i != only_source)
    ]


class Verdict(Enum):
    GRANT = auto()  # let this rank, the first of its group, enter the next step
    REPEAT = auto()  # give this rank the grant that another rank of its group has received
    WAIT = auto()  # keep the request until the lighthouse's next message or the group's next vote
    LEAVE = auto()  # leave the job instead of joining, because the group is draining
    REFUSE = auto()  # refuse this request only
    REFUSE_ALL = auto()  # refuse the requests of all ranks
    GATHER = auto()  # keep the request until all ranks have requested a quorum
    JOIN = auto()  # send the join, because all ranks have requested a quorum


class RequestDecision(NamedTuple):
    verdict: Verdict
    mode: HoldState | None = None  # new mode of the standing quorum; REVOKED if the request ends it
    error: LighthouseError | None = None  # for REFUSE and REFUSE_ALL


def decide_request(group: ReplicaGroup, request: QuorumRequest, now: float) -> RequestDecision:
    """Decide on a rank's request for a quorum, without changing any record.

    The lighthouse ends a standing quorum in one of two ways. It may *revoke* the quorum immediately, after a loss. Or,
    to admit or release a group, it *recalls* the quorum: the managers stop granting and report their highest grants.
    Then it *resumes* the quorum up to the highest step that any of them has granted, so that all reach the same step.

    The manager grants step n under the standing quorum q if and only if

    1. q is neither revoked nor recalled, and if it is resumed, then up to step n or later;
    2. all ranks in the group have committed step n - 1 under q, or q was formed for step n;
    3. its lease is valid: less than LEASE_SHARE of the lease has passed since the manager sent the last heartbeat that
       the lighthouse has acknowledged.

    The first rank's request decides, and the group's other ranks receive the same grant. If the quorum was revoked in
    the meantime, their grant is marked as revoked: they do the step and vote no, so that no rank waits for another. A
    rank that has no usable state does the same if its group has begun the step; otherwise the group joins and heals.
    While the quorum is recalled or the lease has expired, requests wait.

    The group joins only after the last step of a resumed quorum, after a revoke, or after a failed step. From then on
    it never grants under that quorum again, even if the join fails.

    If a group has already begun to compute when it learns that it must heal, the quorum is treated as resumed up to its
    first step. This group contributes zeros to the step and votes no, which does not discard the step in other groups.
    Like the other groups, it joins after all its ranks have voted.

    The group joins only when all its ranks have requested a quorum. If the ranks hold different states, the group joins
    and heals. Clients other than Agents cannot heal in this way, so if the steps in their requests differ, all are
    refused.

    Args:
        group: The records of the replica group.
        request: The rank's request.
        now: The current time in seconds of the monotonic clock.
    """
    rank = group.ranks[request.group_rank]
    verdict, mode = _decide_grant(group, rank, request, now)
    if verdict is not Verdict.JOIN:
        return RequestDecision(verdict)
    if group.drains:
        return RequestDecision(Verdict.LEAVE, mode)
    if (error := _step_error(rank, request)) is not None:
        return RequestDecision(Verdict.REFUSE, mode, error)
    others = [other for other in group.pending(is_gathering=True) if other.group_rank != request.group_rank]
    for other in others:
        # One of the two ranks is not an Agent, so it cannot heal.
        if request.step != other.step and not (request.rank_incarnation and other.rank_incarnation):
            return RequestDecision(Verdict.REFUSE_ALL, mode, _step_mismatch_error(request, other))
    return RequestDecision(Verdict.JOIN if len(others) == group.size - 1 else Verdict.GATHER, mode)


def _decide_grant(
    group: ReplicaGroup, rank: Rank, request: QuorumRequest, now: float
) -> tuple[Verdict, HoldState | None]:
    """Return the verdict on a request under the standing quorum, and the quorum's new mode, or None for no change."""
    standing = group.standing
    if standing is None or standing.mode in (HoldState.JOINING, HoldState.LEAVING):
        return Verdict.JOIN, None
    granted, committed = standing.granted, standing.committed
    is_repeated = request.step == granted and committed < request.step and request.commit_failures == 0
    if is_repeated and (request.distrust is None or group.size > 1):
        return Verdict.REPEAT, None
    if standing.mode is HoldState.REVOKED:
        return Verdict.JOIN, None
    if standing.is_late and rank.has_voted:
        if not all(rank.has_voted for rank in group.ranks):
            return Verdict.WAIT, None
        return Verdict.JOIN, HoldState.JOINING
    has_failed = request.commit_failures > 0 or request.distrust is not None
    if has_failed or request.step != granted + 1 or committed != granted:
        return Verdict.JOIN, HoldState.REVOKED
    if standing.mode is HoldState.RECALLED:
        return Verdict.WAIT, None
    if now >= group.lease_until:
        return Verdict.WAIT, None
    return Verdict.GRANT, None


def _step_error(rank: Rank, request: QuorumRequest) -> LighthouseError | None:
    """Return an error if the request's step is malformed or earlier than the rank's last state, otherwise None."""
    try:
        check_count(request.step, "step")
    except InvalidRequest as e:
        return e
    last = rank.last_request
    if last is None or last.rank_incarnation != request.rank_incarnation:
        return None
    # Compare the held states: while a rank is catching up, its request's step is later than its state's, and may fall
    # back to it. Also, a quorum since the last request may have made the rank heal to an older state than its own.
    held, was_held = request.holds.step, last.holds.step
    since, lowest = rank.lowest or (last.holds, was_held)
    if held >= (min(was_held, lowest) if since == last.holds else was_held):
        return None
    return InvalidRequest(
        f"of rank {request.group_rank} went from {was_held} back to {held}; "
        "if a rank has lost its state, restart its whole group",
        field="step",
    )


# The lighthouse waits for the whole lease after a heartbeat's arrival, so the two clocks may drift by a tenth.
LEASE_SHARE = 0.8

_S, _C, _U, _J, _L, _V = HoldState
_OBEYED = {
    # The manager's mode: STANDING, RECALLED, RESUMED, JOINING, LEAVING, REVOKED.
    QuorumPhase.RETURNING: (_S, _C, _U, _J, _L, _V),
    QuorumPhase.STANDING: (_S, _C, _U, _J, _L, _V),
    QuorumPhase.RECALLED: (_C, _C, _C, _J, _L, _V),
    QuorumPhase.RESUMED: (_U, _U, _U, _J, _L, _V),
    QuorumPhase.REVOKED: (_V, _V, _V, _J, _V, _V),
}
NEXT_MODES = {(old, order): new for order, row in _OBEYED.items() for old, new in zip(HoldState, row, strict=True)}
"""Next mode of the standing quorum, by its current mode and the phase in the lighthouse's order.

The phase NONE never names a standing quorum, so it has no entry."""


class QuorumRequests:
    """Combines the requests of all ranks into one join, and stores the standing quorum.

    - Ranks hold different states if their tags differ. A tag is the step of a state and the quorum that committed it.
      The group then joins at the lowest of its ranks' steps, marked `ranks_disagree`, and heals.
    - If no other group of the quorum can heal the ranks, they are refused and must exit. Exception: a group that is now
      alone but had peers in the previous quorum asks again, because a peer with the state may return. After a restart,
      the manager does not know whether the group had peers, and assumes so only if a rank's state is unusable.
    - A new `rank_incarnation` means that the rank has lost its state, so the group takes a new incarnation.
    - If a rank exits normally when all steps are committed and none has begun, the group leaves the standing quorum and
      gives up a grant that it has not used.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """Return the address at which a rank serves its state, as given in its last request.

        Raise WrongState if the rank has not requested a quorum yet, or is not at `step`. If `step` is None, the
        rank may be at any step.
        """
        check_rank(group_rank, self._group.size)
        last = self._group.ranks[group_rank].last_request
        if last is None:
            raise WrongState(f"rank: rank {group_rank} has not asked for a quorum yet; retry once it has")
        if step is not None and last.step != step:
            raise WrongState(f"step: rank {group_rank} is at step {last.step}, not at {step}; ask for a new quorum")
        return last.checkpoint_address

    # -- joins

    def gather(self, request: QuorumRequest) -> None:
        """Store a rank's request until all ranks have requested a quorum, so the group can join."""
        group, rank = self._group, self._group.ranks[request.group_rank]
        last = rank.last_request
        if last is not None and last.rank_incarnation != request.rank_incarnation:
            group.incarnation += 1
            if group.had_peers:
                group.had_peers = None
            group.step = min(group.step, request.holds.step)  # a session that opens before the join reports it
        group.wait(request, is_gathering=True)
        rank.last_request = request

    def join(self, me: Participant) -> Participant:
        """Return `me` with the fields that the ranks' requests determine. All ranks must have requested a quorum."""
        group, standing = self._group, self._group.standing
        asks = sorted(group.pending(is_gathering=True), key=lambda ask: ask.group_rank)
        states = {ask.holds for ask in asks}
        distrust = next((ask.distrust for ask in asks if ask.distrust is not None), None)
        heals_first = [ask.heals_first for ask in asks]
        group.step = min(ask.holds.step for ask in asks)
        works_at = max(ask.step for ask in asks) if any(ask.catch_up.held for ask in asks) else None
        commit_failures = max(ask.commit_failures for ask in asks)
        if standing is not None and standing.is_late and standing.mode is HoldState.JOINING:
            works_at, commit_failures = standing.granted + 1, 0
        return replace(
            me,
            step=group.step,
            tag_quorum_id=asks[0].holds.quorum_id if len(states) == 1 and distrust is None else None,
            ranks_disagree=len(states) > 1 or distrust is not None,
            shrink_only=any(ask.shrink_only for ask in asks),
            commit_failures=commit_failures,
            catch_up=all(ask.catch_up.is_wanted for ask in asks),
            works_at=works_at,
            has_source=all(ask.catch_up.has_source for ask in asks),
            compares=all(ask.compares for ask in asks),
            distrust=distrust,
            heals_first=None if None in heals_first else all(heals_first),
        )

    def enter_quorum(self, quorum: Quorum, *, stands: bool) -> list[QuorumAnswered] | LighthouseError:
        """Record the quorum that answers the group's join. `stands` means that the quorum may last for many steps.

        Return the answers to the ranks' requests, or the error with which to refuse all of them.
        """
        group, asks = self._group, self._group.pending(is_gathering=True)
        if quorum.quorum_id < group.quorum_id:
            return WrongState(
                f"quorum_id: the lighthouse sent {quorum.quorum_id} after {group.quorum_id}, so it has lost its "
                "records; retry: the next request reports the higher id"
            )
        answers: list[QuorumAnswered] = []
        for ask in asks:
            assignment = assign(quorum, group.me.wire_id, ask.group_rank, ask.init_sync, stands=stands)
            if assignment is None:
                return InternalError(f"the lighthouse's quorum {quorum.quorum_id} does not contain {group.me.wire_id}")
            answers.append(QuorumAnswered(ask.call, assignment, quorum))
        group.quorum_id = quorum.quorum_id
        mine = answers[0].assignment
        is_behind = mine.heals or mine.place is None
        is_alone = len(quorum.participants) == 1
        if not is_behind and (error := self._find_missing_state(asks, is_alone=is_alone)) is not None:
            return error
        group.had_peers = not is_alone
        group.max_step = mine.max_step
        self._note_lowest(asks)
        for ask in asks:
            group.ranks[ask.group_rank].pending = None
        group.standing = None
        if stands:
            self.hold(quorum, group.max_step, init_sync=all(ask.init_sync for ask in asks))
        return answers

    def _find_missing_state(self, asks: Sequence[QuorumRequest], *, is_alone: bool) -> LighthouseError | None:
        """Return the error if the ranks must heal but cannot, or None if all of them hold the same usable state.

        `is_alone` means that the group has no peers in the quorum.
        """
        torn = next((ask for ask in asks if ask.distrust is not None), None)
        odd = torn or next((other for other in asks[1:] if other.holds != asks[0].holds), None)
        if odd is None:
            return None
        had_peers = torn is not None if self._group.had_peers is None else self._group.had_peers
        return missing_state_error(asks[0], odd, may_heal=is_alone and had_peers)

    def _note_lowest(self, asks: Sequence[QuorumRequest]) -> None:
        group = self._group
        for ask in asks:
            rank = group.ranks[ask.group_rank]
            held, lowest = rank.lowest or (ask.holds, group.max_step)
            lowest = min(lowest, group.max_step) if held == ask.holds else group.max_step
            rank.lowest = ask.holds, lowest
            group.step = min(group.step, lowest)

    # -- the standing quorum

    def hold(self, quorum: Quorum, step: int, *, init_sync: bool = True) -> None:
        """Store a quorum that may last for many steps, the first of which is `step`. For `init_sync` see `assign`."""
        group = self._group
        for rank in group.ranks:
            rank.assigned, rank.has_voted, rank.catch_up = {}, False, None
        mode = HoldState.RESUMED if self._is_for_one_step(quorum, init_sync) else HoldState.STANDING
        group.standing = standing = StandingQuorum(quorum, mode, formed_for=step, granted=step, upto=step)
        mine = self._assign(standing, 0, init_sync)
        standing.is_late = mine.place is None and not (mine.heals or mine.catches_up)
        group.lease_until = group.renewed_until  # an earlier lighthouse may have given a longer lease

    def renew_lease(self, until: float) -> None:
        self._group.renewed_until = until
        self._group.lease_until = max(self._group.lease_until, until)

    def record_committed_step(self, quorum_id: int, step: int) -> None:
        """Record that all ranks in the group have committed a step."""
        standing = self._group.standing
        if standing is not None and standing.quorum.quorum_id == quorum_id:
            standing.committed = max(standing.committed, step)
            self._end_when_done(standing)

    def record_vote(self, vote: PendingVote) -> bool:
        """Record a rank's vote. Return True if all ranks have voted and the group was too late to heal."""
        standing, ranks = self._group.standing, self._group.ranks
        ranks[vote.group_rank].wants_next = vote.wants_next
        if standing is None or (vote.quorum_id, vote.step) != (standing.quorum.quorum_id, standing.granted):
            return False
        ranks[vote.group_rank].has_voted = True
        return standing.is_late and all(rank.has_voted for rank in ranks)

    def should_end_on_discard(self, quorum_id: int) -> bool:
        """Return whether the discard of a step under `quorum_id` ends the standing quorum for this group.

        A group that was too late to heal contributes zeros and always discards the step. It stays in the quorum until
        all its ranks have voted, because they still take part in the other groups' collectives.
        """
        standing = self._group.standing
        return standing is not None and standing.quorum.quorum_id == quorum_id and not standing.is_late

    def apply_order(self, order: QuorumOrder) -> bool:
        """Apply the lighthouse's order to the standing quorum. Ignore an order for another quorum.

        Return True if the ranks must be notified of a revoke. Raise InternalError if the order is invalid for the
        quorum's mode.
        """
        standing = self._group.standing
        if standing is None or order.quorum_id != standing.quorum.quorum_id:
            return False
        old = standing.mode
        if (old, order.phase) not in NEXT_MODES:
            raise InternalError(f"quorum {order.quorum_id} is {old}, and the lighthouse's order is {order.phase}")
        standing.mode = NEXT_MODES[old, order.phase]
        if order.phase is QuorumPhase.RESUMED and standing.mode is HoldState.RESUMED:
            standing.upto = order.upto
            self._end_when_done(standing)
        if order.phase is not QuorumPhase.REVOKED:
            return False
        is_news = standing.mode is not old or (bool(order.lost) and not standing.knows_lost)
        standing.knows_lost |= bool(order.lost)
        standing.is_revoked_by_order |= old in GRANTING
        return is_news

    def _end_when_done(self, standing: StandingQuorum) -> None:
        """If the quorum's last step is committed, allow no more grants. The next request then joins."""
        if standing.mode is HoldState.RESUMED and standing.committed == standing.granted >= standing.upto:
            standing.mode = HoldState.JOINING

    def give_up(self) -> bool:
        """End the quorum for this group after a failed step or a lost rank. Return False if it had already ended."""
        standing = self._group.standing
        if standing is None or standing.mode not in GRANTING:
            return False
        standing.mode = HoldState.REVOKED
        return True

    def leave(self, step: int | None) -> None:
        """Leave the quorum because a rank is exiting normally, unless a step has begun and is not committed yet.

        Also leave a quorum that the lighthouse revoked after the group had completed all its steps, so that the
        lighthouse records a normal exit instead of a loss. `step` is the step that the rank would request next, or None
        if it is in the middle of a step.
        """
        standing = self._group.standing
        if standing is None:
            return
        committed = standing.committed
        has_done_all = standing.is_revoked_by_order and committed == standing.granted
        may_leave = standing.mode in GRANTING or standing.mode is HoldState.JOINING or has_done_all
        standing.is_revoked_by_order = False
        if may_leave and committed >= standing.formed_for and step == committed + 1:
            standing.mode, standing.granted = HoldState.LEAVING, committed

    def grant_next(self, now: float) -> bool:
        """Grant the next step together with the commit of the previous one, if the quorum's mode and lease allow it.

        Return True if granted.
        """
        standing = self._group.standing
        if standing is None or standing.mode not in (HoldState.STANDING, HoldState.RESUMED):
            return False
        if standing.committed != standing.granted or now >= self._group.lease_until:
            return False
        standing.granted += 1
        self._group.grants += 1
        return True

    def grant(self, request: QuorumRequest, *, is_first: bool) -> Assignment:
        """Grant a rank the step that it requests, and return its assignment.

        `is_first` means that the rank is the first of its group to request the step. Later ranks get the same grant.
        """
        standing = self._group.standing
        assert standing is not None
        if is_first:
            standing.granted = request.step
            self._group.grants += 1
        assignment = self.assignment(request.group_rank, request.init_sync)
        if assignment.catches_up and standing.granted > standing.formed_for:
            self._note_catch_up(standing, request, is_first)
        return assignment

    @property
    def is_catching_up(self) -> bool:
        """True if the group is behind and is healing while the other groups continue to train."""
        standing = self._group.standing
        return standing is not None and self._assign(standing, 0, True).catches_up

    def assignment(self, group_rank: int, init_sync: bool) -> Assignment:
        """Return a rank's assignment for the highest granted step.

        After the quorum's first step, only groups that are catching up still heal, and these do not contribute.
        """
        standing = self._group.standing
        assert standing is not None
        formed = self._assign(standing, group_rank, init_sync)
        revoked = standing.mode is HoldState.REVOKED
        if standing.granted == standing.formed_for:
            return replace(formed, revoked=revoked)
        contributors = formed.replica_world_size - len(formed.catching_up)
        place = formed.replica_rank - sum(rank < formed.replica_rank for rank in formed.catching_up)
        return replace(
            formed,
            max_step=standing.granted,
            max_rank=None if formed.catches_up else place,
            max_world_size=contributors,
            contributors=contributors,
            place=None if formed.catches_up else place,
            healing=(),
            tag_quorum_id=formed.quorum_id,
            heal_from_rank=None,
            heal_from_address="",
            other_sources=(),
            serve_to=(),
            commit_failures=0,
            revoked=revoked,
        )

    def _assign(self, standing: StandingQuorum, group_rank: int, init_sync: bool) -> Assignment:
        """Return a rank's assignment for the quorum's first step. It is cached, because `assign` is slow."""
        assigned = self._group.ranks[group_rank].assigned
        formed = assigned.get(init_sync)
        if formed is None:
            formed = assign(standing.quorum, self._group.me.wire_id, group_rank, init_sync, stands=True)
            assert formed is not None
            assigned[init_sync] = formed
        return formed

    def _is_for_one_step(self, quorum: Quorum, init_sync: bool) -> bool:
        return is_for_one_step(quorum, init_sync, self._group.size)

    def _note_catch_up(self, standing: StandingQuorum, request: QuorumRequest, is_first: bool) -> None:
        """Record a rank's catch-up state. Once all ranks have reported, decide whether the group needs a new quorum.

        The group needs a new quorum if all ranks have caught up, or if a rank has no source to catch up from.
        `is_first` means that the request is the group's first for its step, so all earlier states are discarded.
        """
        ranks = self._group.ranks
        if is_first:
            for rank in ranks:
                rank.catch_up = None
        ranks[request.group_rank].catch_up = request.catch_up
        reported = [rank.catch_up for rank in ranks if rank.catch_up is not None]
        if len(reported) == len(ranks):
            lagging = [rank for rank in reported if rank.held is not None]
            standing.wants_next |= not all(rank.has_source for rank in lagging) or not lagging
