"""Rules for the ranks' requests for a quorum. No I/O.

A request leads to a join, or to a grant under the standing quorum. `GatherMachine` collects the requests of all ranks
into one join, and answers them with the quorum. `assign` computes the consequences of a quorum for one rank: its place,
its sources and its targets. `GrantMachine` is the manager's part of a standing quorum: it lets the ranks into the next
steps without asking the lighthouse. The first functions build the refusals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lighthouse_protocol.constraints import check_count
from lighthouse_protocol.messages.membership import Assignment, Distrust, Participant, Quorum
from lighthouse_protocol.messages.session import HeldQuorum, HoldState, QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import (
    InternalError,
    InvalidRequest,
    LighthouseError,
    Superseded,
    Unrecoverable,
    WrongState,
)
from manager.group import events
from manager.group.records import QuorumRequest, ReplicaGroup


def check_rank(group_rank: int, group_world_size: int) -> None:
    if not 0 <= group_rank < group_world_size:
        raise no_such_rank(group_rank, group_world_size)


def no_such_rank(group_rank: int, group_world_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"is {group_rank}; the group has ranks 0 to {group_world_size - 1} (--group-world-size)", field="rank"
    )


def superseded(group_rank: int) -> Superseded:
    return Superseded(f"rank {group_rank} has asked again")


def steps_differ(ask: QuorumRequest, other: QuorumRequest) -> Unrecoverable:
    return Unrecoverable(
        f"step: rank {ask.group_rank} is at step {ask.step} and rank {other.group_rank} at {other.step}; the ranks of "
        "a group advance together: restart the group, or load one checkpoint in all its ranks"
    )


def no_state(ask: QuorumRequest, other: QuorumRequest, *, may_heal: bool) -> LighthouseError:
    """Build the refusal of two ranks that hold different states, or of which `other` holds none.

    Args:
        ask: The request of one rank.
        other: The request of the other rank.
        may_heal: Whether a peer that can heal them may return, so that the ranks should ask again.
    """
    torn = other.distrust
    what = f"{torn.text if torn is not None else _differ(ask, other)}, and no other group can heal them"
    if may_heal:
        return WrongState(f"step: {what} at the moment; ask again until one returns")
    what_to_do = "load one checkpoint in all its ranks" if torn is None else "the job from its last checkpoint"
    return Unrecoverable(f"step: {what}: restart the group, or {what_to_do}")


def _differ(ask: QuorumRequest, other: QuorumRequest) -> str:
    held, other_held = ask.holds, other.holds
    return (
        f"rank {ask.group_rank} holds step {held.step} of quorum {held.quorum_id} and rank {other.group_rank} step "
        f"{other_held.step} of quorum {other_held.quorum_id}"
    )


MAX_OTHER_SOURCES = 4


def assign(
    quorum: Quorum, wire_id: str, group_rank: int, init_sync: bool, *, stands: bool = False
) -> Assignment | None:
    """Compute a rank's assignment in a quorum, or return None if it has no participant `wire_id`.

    All managers of a quorum, including torchft's, must compute the same result.

    1. Participants below max_step heal. At step 0 with `init_sync`, all heal from one participant (`_origin`).
    2. Of the n participants that are up to date, number (i + group_rank) mod n is the source of the i-th that heals.
       The next MAX_OTHER_SOURCES are its replacements.
    3. A participant that heals counts in the same step if every participant supports this (`heals_first` is not None)
       and this one heals before it computes. If it would heal too late, it gets no source, adds zeros, and heals under
       the next quorum, which therefore follows after one step (`is_for_one_step`).
    4. If the quorum stands, a participant with `catch_up` heals during its steps instead. It contributes nothing until
       the next quorum, and gets no source if it already has one.
    """
    members = quorum.participants
    mine = next((i for i, member in enumerate(members) if member.wire_id == wire_id), None)
    if mine is None:
        return None
    max_step, at_max = _at_max(members)
    primary = at_max[group_rank % len(at_max)]
    behind = _behind(members, group_rank, init_sync)
    all_say = _all_say(members)
    catching_up, healing, served = list[int](), list[int](), list[int]()
    for i in behind:
        if _catches_up(members[i], max_step, stands=stands):
            catching_up.append(i)
            if not members[i].has_source:
                served.append(i)
        elif members[i].heals_first or not all_say:
            healing.append(i)
            served.append(i)
    sources = sorted(set(range(len(members))).difference(behind))
    contributors = sorted(sources + healing) if all_say else sources
    dealt = {target: (n + group_rank) % len(sources) for n, target in enumerate(served)}
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
        serve_to=tuple(target for target, at in dealt.items() if sources[at] == mine),
        commit_failures=max(member.commit_failures for member in members),
        catching_up=tuple(catching_up),
        tag_quorum_id=members[at_max[0]].tag_quorum_id,
        compares=all(member.compares for member in members),
        place=contributors.index(mine) if mine in contributors else None,
        healing=tuple(healing),
    )
    if mine not in dealt:
        return answer
    first, *others = (sources[dealt[mine] :] + sources[: dealt[mine]])[: 1 + MAX_OTHER_SOURCES]
    return replace(
        answer,
        heal_from_rank=first,
        heal_from_address=members[first].address,
        other_sources=tuple(members[other].address for other in others),
    )


def is_for_one_step(quorum: Quorum, init_sync: bool, group_world_size: int) -> bool:
    """Return whether another quorum must follow after the first step of this standing quorum.

    This is so if a participant learns too late that it must heal. All managers must compute the same result.
    """
    members = quorum.participants
    if not _all_say(members):
        return False
    max_step, _ = _at_max(members)
    ranks = range(group_world_size if max_step == 0 else 1)  # the ranks differ only at step 0
    behind = {i for group_rank in ranks for i in _behind(members, group_rank, init_sync)}
    return any(not members[i].heals_first and not _catches_up(members[i], max_step, stands=True) for i in behind)


def _at_max(members: tuple[Participant, ...]) -> tuple[int, list[int]]:
    max_step = max(member.step for member in members)
    return max_step, [i for i, member in enumerate(members) if member.step == max_step]


def _all_say(members: tuple[Participant, ...]) -> bool:
    return all(member.heals_first is not None for member in members)


def _catches_up(member: Participant, max_step: int, *, stands: bool) -> bool:
    return stands and member.catch_up and member.step < max_step


def _origin(members: tuple[Participant, ...], at_max: list[int], group_rank: int) -> int:
    """Return the index of the participant from which all others start at step 0.

    torchft selects another one for each group_rank. If all participants send tags, as our Agents do, all ranks start
    from the same one, so that the ranks of a group hold parts of one model. A group whose ranks disagree has no tag
    either, and is selected only if there is no other.
    """
    if any(member.tag_quorum_id is None and not member.ranks_disagree for member in members):
        return at_max[group_rank % len(at_max)]
    return next((i for i in at_max if not members[i].ranks_disagree), at_max[0])


def _behind(members: tuple[Participant, ...], group_rank: int, init_sync: bool) -> list[int]:
    max_step, at_max = _at_max(members)
    only_source = _origin(members, at_max, group_rank) if init_sync and max_step == 0 else None
    return [
        i
        for i, member in enumerate(members)
        if member.step != max_step or (only_source is not None and i != only_source)
    ]


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Send this join to the lighthouse."""

    round: int
    step: int  # tag of the group's state, with `tag_quorum_id`
    incarnation: int
    tag_quorum_id: int | None
    ranks_disagree: bool
    shrink_only: bool
    commit_failures: int
    seen_quorum_id: int
    deadline_at: float
    handles: tuple[str, ...]
    catch_up: bool = False
    works_at: int | None = None  # step of the training, if the group's state is older
    has_source: bool = False
    compares: bool = False
    distrust: Distrust | None = None
    heals_first: bool | None = None


@dataclass(frozen=True, slots=True)
class JoinTakenBack:
    round: int


@dataclass(frozen=True, slots=True)
class RoundAnswered:
    """All ranks receive the quorum and work at `step`, its max_step. Ranks that are behind heal to it."""

    quorum_id: int
    step: int


Effect = GroupJoined | JoinTakenBack | RoundAnswered | events.QuorumAnswered | events.CallRefused


class GatherMachine:
    """Collects the requests of all ranks into one join.

    The group joins when every rank has a request, never before. A repeated request replaces the rank's older one, and a
    withdrawn request withdraws the join. An answer never reaches another join than its own. An error reaches all
    waiting ranks. The machine has no timeouts: callers end their calls, and the join carries the earliest deadline.

    - Ranks that hold different states (their tags differ) join at their lowest step as a group whose ranks disagree,
      and heal. Callers other than Agents cannot heal: if their steps differ, all are refused, with both numbers.
    - If no group of the quorum can heal ranks that disagree, or a rank without a state, the ranks must end. A group
      that is alone but had peers in the previous quorum asks again instead, because a peer with the state may return.
      A restarted manager does not know its earlier peers, so only a torn state counts as a sign of them.
    - A new `rank_incarnation` means that the rank has lost its state, so the group takes a new incarnation.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.round = 0  # the number of the last join
        self.is_joined = False
        self.incarnation = 0
        self._max_step: int | None = None
        self._had_peers: bool | None = None  # in the last quorum of the same processes, or None if unknown
        self.quorum_id = 0
        self.step = 0
        """Step of the state that the group holds, or the lowest one that it may have healed to since it joined."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks with a gathering request."""
        return tuple(sorted(ask.group_rank for ask in self.asks))

    @property
    def asks(self) -> tuple[QuorumRequest, ...]:
        """The gathering requests in order of arrival."""
        return self._group.pending(is_gathering=True)

    def call_of(self, group_rank: int) -> int | None:
        """Return the call of a rank whose request gathers, or None."""
        pending = self._group.ranks[group_rank].pending
        return pending.request.call if pending is not None and pending.is_gathering else None

    @property
    def max_step(self) -> int:
        """The step that the last quorum was formed for."""
        return self._max_step or 0

    def checkpoint_address(self, group_rank: int, step: int | None) -> str:
        """Return the address at which a rank serves its state, from its last request.

        Raises:
            InvalidRequest: The group has no such rank.
            WrongState: The rank has not requested a quorum, or is at another step.
        """
        check_rank(group_rank, self._group.size)
        last = self._group.ranks[group_rank].last_request
        if last is None:
            raise WrongState(f"rank: rank {group_rank} has not asked for a quorum yet; ask again once it has")
        if step is not None and last.step != step:
            raise WrongState(f"step: rank {group_rank} is at step {last.step}, not at {step}; ask for a new quorum")
        return last.checkpoint_address

    def receive(self, number: int, quorum: Quorum, *, stands: bool = False) -> list[Effect]:
        """Answer the ranks with the quorum of join `number`. Ignore a late answer to an older join."""
        return self._receive(quorum, stands) if self.is_joined and number == self.round else []

    def fail(self, number: int, error: LighthouseError) -> list[Effect]:
        """Refuse the ranks' requests because the lighthouse has refused join `number`."""
        return self.refuse_all(error) if self.is_joined and number == self.round else []

    def ask(self, ask: QuorumRequest) -> list[Effect]:
        """Add a rank's request. Join if requests of all ranks are present."""
        try:
            check_rank(ask.group_rank, self._group.size)
            self._check_step(ask)
        except LighthouseError as e:
            return [events.CallRefused(ask.call, e)]
        effects: list[Effect] = []
        if (older := self.call_of(ask.group_rank)) is not None:
            effects += [*self.withdraw(older), events.CallRefused(older, superseded(ask.group_rank))]
        self._note_worker(ask)
        self._group.wait(ask, is_gathering=True)
        self._group.ranks[ask.group_rank].last_request = ask
        asks = self.asks
        odd = next((other for other in asks if _cannot_meet(ask, other)), None)
        if odd is not None:
            return effects + self.refuse_all(steps_differ(ask, odd))
        return effects + (self._join() if len(asks) == self._group.size else [])

    def _check_step(self, ask: QuorumRequest) -> None:
        check_count(ask.step, "step")
        last = self._group.ranks[ask.group_rank].last_request
        if last is None or last.rank_incarnation != ask.rank_incarnation:
            return
        # Compare the states that the rank holds, because a rank that catches up works at a later step and may fall
        # back. A quorum may also have made it heal to an older state than its own, even some quorums ago if it catches
        # up.
        held, was_held = ask.holds.step, last.holds.step
        since, lowest = self._group.ranks[ask.group_rank].lowest or (last.holds, was_held)
        if held < (min(was_held, lowest) if since == last.holds else was_held):
            raise InvalidRequest(
                f"of rank {ask.group_rank} went from {was_held} back to {held}; "
                "a rank that lost its state restarts, and its group with it",
                field="step",
            )

    def _note_worker(self, ask: QuorumRequest) -> None:
        last = self._group.ranks[ask.group_rank].last_request
        if last is not None and last.rank_incarnation != ask.rank_incarnation:
            self.incarnation += 1
            if self._had_peers:
                self._had_peers = None
            self.step = min(self.step, ask.holds.step)  # a session that opens before the join reports it

    def _join(self) -> list[Effect]:
        asks = sorted(self.asks, key=lambda ask: ask.group_rank)
        states = {ask.holds for ask in asks}
        distrust = next((ask.distrust for ask in asks if ask.distrust is not None), None)
        lags = any(ask.catch_up.held for ask in asks)
        self.round += 1
        self.is_joined = True
        self.step = min(ask.holds.step for ask in asks)
        return [
            GroupJoined(
                round=self.round,
                step=self.step,
                incarnation=self.incarnation,
                tag_quorum_id=asks[0].holds.quorum_id if len(states) == 1 and distrust is None else None,
                ranks_disagree=len(states) > 1 or distrust is not None,
                shrink_only=any(ask.shrink_only for ask in asks),
                commit_failures=max(ask.commit_failures for ask in asks),
                seen_quorum_id=self.quorum_id,
                deadline_at=min(ask.deadline_at for ask in asks),
                handles=tuple(ask.handle for ask in asks),
                catch_up=all(ask.catch_up.is_wanted for ask in asks),
                works_at=max(ask.step for ask in asks) if lags else None,
                has_source=all(ask.catch_up.has_source for ask in asks),
                compares=all(ask.compares for ask in asks),
                distrust=distrust,
                heals_first=_heals_first(asks),
            )
        ]

    def withdraw(self, call: int) -> list[Effect]:
        """Remove the request of an ended call, and take back the group's join."""
        if not self._group.withdraw(call, is_gathering=True) or not self.is_joined:
            return []
        self.is_joined = False
        return [JoinTakenBack(self.round)]

    def _receive(self, quorum: Quorum, stands: bool) -> list[Effect]:
        if quorum.quorum_id < self.quorum_id:
            return self.refuse_all(_went_back(quorum.quorum_id, self.quorum_id))
        answers: list[events.QuorumAnswered] = []
        for ask in self.asks:
            assignment = assign(quorum, self._group.wire_id, ask.group_rank, ask.init_sync, stands=stands)
            if assignment is None:
                return self.refuse_all(
                    InternalError(f"the lighthouse's quorum {quorum.quorum_id} lacks {self._group.wire_id}")
                )
            answers.append(events.QuorumAnswered(ask.call, assignment, quorum))
        self.quorum_id = quorum.quorum_id
        mine = answers[0].assignment
        is_behind = mine.heals or mine.place is None
        is_alone = len(quorum.participants) == 1
        if not is_behind and (error := self._without_state(is_alone=is_alone)) is not None:
            return self.refuse_all(error)
        self._had_peers = not is_alone
        self._max_step = mine.max_step
        self._note_lowest(mine.max_step)
        self._group.clear(is_gathering=True)
        self.is_joined = False
        return [RoundAnswered(quorum.quorum_id, self._max_step), *answers]

    def _without_state(self, *, is_alone: bool) -> LighthouseError | None:
        """Return why the ranks are refused if they need to heal, or None if all hold the same state."""
        asks = self.asks
        torn = next((ask for ask in asks if ask.distrust is not None), None)
        odd = torn or next((other for other in asks[1:] if other.holds != asks[0].holds), None)
        if odd is None:
            return None
        had_peers = torn is not None if self._had_peers is None else self._had_peers
        return no_state(asks[0], odd, may_heal=is_alone and had_peers)

    def _note_lowest(self, max_step: int) -> None:
        for ask in self.asks:
            rank = self._group.ranks[ask.group_rank]
            held, lowest = rank.lowest or (ask.holds, max_step)
            lowest = min(lowest, max_step) if held == ask.holds else max_step
            rank.lowest = ask.holds, lowest
            self.step = min(self.step, lowest)

    def refuse_all(self, error: LighthouseError) -> list[Effect]:
        """Refuse every gathering request."""
        taken_back: list[Effect] = [JoinTakenBack(self.round)] if self.is_joined else []
        refused: list[Effect] = [events.CallRefused(ask.call, error) for ask in self.asks]
        self._group.clear(is_gathering=True)
        self.is_joined = False
        return taken_back + refused


def _heals_first(asks: Sequence[QuorumRequest]) -> bool | None:
    """Return whether all ranks heal first, or None if some rank does not report it."""
    said = [ask.heals_first for ask in asks]
    return None if None in said else all(said)


def _cannot_meet(ask: QuorumRequest, other: QuorumRequest) -> bool:
    """Return whether two ranks are at different steps, and one cannot heal because it is no Agent."""
    return ask.step != other.step and not (ask.rank_incarnation and other.rank_incarnation)


def _went_back(received: int, seen: int) -> WrongState:
    return WrongState(
        f"quorum_id: the lighthouse answered {received} after {seen}; it has forgotten what it gave out. Ask again: "
        "it is told the higher id"
    )


# The lighthouse counts the whole lease from a heartbeat's arrival, so clocks may differ in rate by a tenth.
LEASE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Granted:
    """The rank may enter the step."""

    assignment: Assignment
    is_first: bool  # the first rank of the group to enter it


class Wait:
    """The request waits for the next message of the lighthouse, or for votes of the group."""


@dataclass(frozen=True, slots=True)
class Join:
    """The group must join."""

    gives_up: bool = False  # this ends the standing quorum for all ranks of the group


class GrantMachine:
    """The manager's part of a standing quorum: it grants steps to its ranks without asking the lighthouse.

    It grants step n under quorum q if and only if

    1. q stands, and is neither revoked nor recalled below n;
    2. all ranks of the group have committed n - 1 under q, or q was formed for n;
    3. its lease is valid: less than LEASE_SHARE of it has passed since the newest acknowledged heartbeat was sent.

    The first rank's request decides, and the others receive the same answer. If the quorum has been revoked since, that
    answer is flagged: they run the step and vote no, so no rank waits for another. A rank without a usable state does
    the same if its group has begun the step; otherwise the group joins, and heals. While the quorum is recalled or the
    lease has expired, requests wait.

    The group joins only when it was resumed and has done its last step, when the quorum was revoked, or when a step
    failed. Then it never grants under that quorum again, whatever the result of the join. If a rank ends in good order
    with all steps committed and none begun, the group leaves, and returns the grant that it has not used.

    If a group learns too late that it must heal, the quorum counts as resumed up to its first step. This group does the
    step with zeros and votes no, at no cost to its peers. Like the others, it joins after the votes of all its ranks.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._quorum: Quorum | None = None
        self._formed_for = 0
        self._committed = -1
        self._upto = 0
        self._wants_next = False
        self._knows_lost = False
        self._is_revoked_by_order = False
        self._is_late = False
        self.mode = HoldState.REVOKED
        self.granted = 0
        self.lease_until = 0.0
        self.renewed_until = 0.0  # by the newest acknowledged heartbeat
        self.given = 0  # number of granted steps, under all quorums

    @property
    def held(self) -> HeldQuorum | None:
        if self._quorum is None:
            return None
        return HeldQuorum(self._quorum.quorum_id, self.mode, self.granted, self._wants_next)

    @property
    def grants(self) -> bool:
        """Return whether the quorum allows further grants, at once or after a resume."""
        return self._quorum is not None and self.mode in (HoldState.STANDING, HoldState.RECALLED, HoldState.RESUMED)

    @property
    def is_leaving(self) -> bool:
        """Return whether the ranks have ended in good order under a quorum that is not over yet."""
        return self._quorum is not None and self.mode is HoldState.LEAVING

    @property
    def has_done_late_step(self) -> bool:
        """Return whether the group was too late to heal, has done the step with zeros, and requests the next quorum."""
        return self._quorum is not None and self._is_late and self.mode is HoldState.JOINING

    def take(self, quorum: Quorum, step: int, *, init_sync: bool = True) -> None:
        """Hold a standing quorum that was formed for `step`."""
        self._quorum, self._formed_for, self.granted = quorum, step, step
        self._committed, self._upto = -1, step
        for rank in self._group.ranks:
            rank.assigned, rank.has_voted, rank.catch_up = {}, False, None
        self._wants_next, self._knows_lost = False, False
        self._is_revoked_by_order = False
        mine = self._assign(0, init_sync)
        self._is_late = mine.place is None and not (mine.heals or mine.catches_up)
        self.mode = HoldState.RESUMED if self._is_for_one_step(init_sync) else HoldState.STANDING
        self.lease_until = self.renewed_until  # an earlier lighthouse may have given a longer lease

    def drop(self) -> None:
        """Hold no quorum, because the present one does not stand."""
        self._quorum = None

    def committed(self, quorum_id: int, step: int) -> None:
        """Record that all ranks of the group have committed a step."""
        if self._quorum is not None and self._quorum.quorum_id == quorum_id:
            self._committed = max(self._committed, step)
            self._end_when_done()

    def voted(self, group_rank: int, quorum_id: int | None, step: int) -> bool:
        """Record a rank's vote. Return whether it is the last vote of a group that was too late to heal."""
        if self._quorum is None or (quorum_id, step) != (self._quorum.quorum_id, self.granted):
            return False
        self._group.ranks[group_rank].has_voted = True
        return self._is_late and self._have_all_voted

    @property
    def _have_all_voted(self) -> bool:
        return all(rank.has_voted for rank in self._group.ranks)

    def ends_by_discard(self, quorum_id: int) -> bool:
        """Return whether a discarded step ends the quorum for this group.

        It does not if the group was too late to heal: some of its ranks may still take part in the peers' step.
        """
        return self._quorum is not None and self._quorum.quorum_id == quorum_id and not self._is_late

    def renew(self, until: float) -> None:
        self.renewed_until = until
        self.lease_until = max(self.lease_until, until)

    def obey(self, order: QuorumOrder) -> bool:
        """Apply an order of the lighthouse. Return whether the ranks must be notified of a revoke."""
        if self._quorum is None or order.quorum_id != self._quorum.quorum_id:
            return False
        if order.phase is QuorumPhase.REVOKED:
            return self._end(order.lost)
        if not self.grants:
            return False
        match order.phase:
            case QuorumPhase.RECALLED:
                self.mode = HoldState.RECALLED
            case QuorumPhase.RESUMED:
                self.mode, self._upto = HoldState.RESUMED, order.upto
                self._end_when_done()
            case QuorumPhase.NONE | QuorumPhase.RETURNING | QuorumPhase.STANDING:
                pass
        return False

    def _end_when_done(self) -> None:
        """Request the next quorum once the last step is committed, because no peer waits for this group any more."""
        if self.mode is HoldState.RESUMED and self._committed == self.granted >= self._upto:
            self.mode = HoldState.JOINING

    def _end(self, lost: str) -> bool:
        """End the quorum. Return whether the end or the name of the lost group is new to the ranks."""
        is_over = self.grants or self.is_leaving
        is_news = is_over or (bool(lost) and not self._knows_lost)
        self._knows_lost |= bool(lost)
        self._is_revoked_by_order |= self.grants
        if is_over:
            self.mode = HoldState.REVOKED
        return is_news

    def give_up(self) -> bool:
        """End the quorum because a step failed or a rank was lost. Return whether that changes anything."""
        changes = self.grants
        if changes:
            self.mode = HoldState.REVOKED
        return changes

    def leave(self, step: int | None) -> None:
        """Leave the quorum because a rank ends in good order, if all steps are committed.

        This also applies after the loss of a peer if this group had nothing left to do. The lighthouse then learns that
        the group's script has ended.

        Args:
            step: The step that the rank would request next, or None if it is within a step.
        """
        has_done_all = self._is_revoked_by_order and self._committed == self.granted
        may_leave = self._quorum is not None and (self.grants or self.mode is HoldState.JOINING or has_done_all)
        self._is_revoked_by_order = False
        if may_leave and self._committed >= self._formed_for and step == self._committed + 1:
            self.mode, self.granted = HoldState.LEAVING, self._committed

    def decide(self, ask: QuorumRequest, now: float) -> Granted | Wait | Join:
        """Decide on a rank's request under the rules above."""
        if self._quorum is None or self.mode in (HoldState.JOINING, HoldState.LEAVING):
            return Join()
        is_repeated = ask.step == self.granted and self._committed < ask.step and ask.commit_failures == 0
        if is_repeated and (ask.distrust is None or self._group.size > 1):
            return self._grant(ask, is_first=False)
        if self.mode is HoldState.REVOKED:
            return Join()
        if self._is_late and self._group.ranks[ask.group_rank].has_voted:
            if not self._have_all_voted:
                return Wait()
            self.mode = HoldState.JOINING
            return Join()
        has_failed = ask.commit_failures > 0 or ask.distrust is not None
        if has_failed or ask.step != self.granted + 1 or self._committed != self.granted:
            self.mode = HoldState.REVOKED
            return Join(gives_up=True)
        if self.mode is HoldState.RECALLED:
            return Wait()
        if now >= self.lease_until:
            return Wait()
        self.granted = ask.step
        self.given += 1
        return self._grant(ask, is_first=True)

    def offer(self, now: float) -> bool:
        """Grant the next step with the commit of the highest granted one. Return whether that is allowed."""
        is_free = self._quorum is not None and self.mode in (HoldState.STANDING, HoldState.RESUMED)
        if not is_free or self._committed != self.granted or now >= self.lease_until:
            return False
        self.granted += 1
        self.given += 1
        return True

    def assignment(self, group_rank: int, init_sync: bool) -> Assignment:
        """Return a rank's assignment in the highest granted step.

        After the step that the quorum was formed for, only groups that catch up still heal, and they do not contribute.
        """
        formed = self._assign(group_rank, init_sync)
        revoked = self.mode is HoldState.REVOKED
        if self.granted == self._formed_for:
            return replace(formed, revoked=revoked)
        contributors = formed.replica_world_size - len(formed.catching_up)
        place = formed.replica_rank - sum(rank < formed.replica_rank for rank in formed.catching_up)
        return replace(
            formed,
            max_step=self.granted,
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

    def _assign(self, group_rank: int, init_sync: bool) -> Assignment:
        """Compute a rank's assignment once per quorum, because it is O(participants)."""
        assigned = self._group.ranks[group_rank].assigned
        formed = assigned.get(init_sync)
        if formed is None:
            assert self._quorum is not None
            formed = assign(self._quorum, self._group.wire_id, group_rank, init_sync, stands=True)
            assert formed is not None
            assigned[init_sync] = formed
        return formed

    def _is_for_one_step(self, init_sync: bool) -> bool:
        assert self._quorum is not None
        return is_for_one_step(self._quorum, init_sync, self._group.size)

    def _grant(self, ask: QuorumRequest, *, is_first: bool) -> Granted:
        assignment = self.assignment(ask.group_rank, ask.init_sync)
        if assignment.catches_up and self.granted > self._formed_for:
            self._note_catch_up(ask, is_first)
        return Granted(assignment, is_first)

    def _note_catch_up(self, ask: QuorumRequest, is_first: bool) -> None:
        """Request another quorum once all ranks have caught up, or a rank cannot catch up under this quorum."""
        ranks = self._group.ranks
        if is_first:
            for rank in ranks:
                rank.catch_up = None
        ranks[ask.group_rank].catch_up = ask.catch_up
        told = [rank.catch_up for rank in ranks if rank.catch_up is not None]
        if len(told) == len(ranks):
            lagging = [rank for rank in told if rank.held is not None]
            self._wants_next |= not all(rank.has_source for rank in lagging) or not lagging
