"""Rules that decide which states are up to date, which id a quorum gets, and which candidates become its members.

A state has a *tag*: (step, quorum_id under which that step was committed). Among the states at the highest step, the
largest set with equal tags is up to date; in a tie, the tag with the highest quorum_id wins. The lighthouse lowers the
step of all other groups at that step, and of groups whose ranks disagree, so that they heal from an up-to-date group.
All managers, including those of torchft, then compute the same assignment from the steps alone.

The *lineage* of a job consists of the states from which its quorums formed and those that they committed. Other states
are *foreign*. A *member* is a group that was in the last quorum.

1. A running job's lineage wins. If a member is a candidate with a state of the lineage, candidates with foreign or
   unknown states heal, however high their step is. A state belongs to the lineage if its tag names a quorum of this
   job, or is the tag of a state from which one formed. If no such member is a candidate (a cold start), the highest
   step wins.
2. Any reader of the status knows the quorum_id, so a tag alone proves nothing. A non-member that is ahead of the
   members is foreign, too, unless its group was in the quorum that its tag names, or in a quorum that formed from that
   state. It may then be one step ahead of the last quorum, because members are at most one step apart. For example, a
   manager may have restarted while its ranks continued. This is why the replica_id decides here, not the incarnation.
   The last quorum has reached at least the step at which it formed, because its sources held the state of that step.
3. A group that happens to connect first must not override groups that have trained for long. If no group with the
   state of the last quorum is a candidate, the next quorum begins a *branch* at a lower step. States of the quorums
   before the branch may be ahead by any number of steps, until EARLIER_COUNTS_FOR_S after it began. So may states of
   quorums that this lighthouse does not know, because the journal is lost or outdated. They belong to the lineage until
   EARLIER_COUNTS_FOR_S after the first quorum. This rule trusts the managers' reports.
4. If no group at the highest step has a known tag (torchft members that resumed from disk, or groups with an unknown
   past), their states may have diverged. The first group is the source and the others heal. At step 0 all
   states are equal.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from lighthouse.job.records import LastAssignment, QuorumRecord
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import InvalidRequest

RANGES_KEPT = 64
EARLIER_COUNTS_FOR_S = 600.0  # since this lighthouse's first quorum, or since a branch began


class History:
    """Quorum ids under which states of this job were committed. Stored as ranges, because most ids are consecutive."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = list(ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last id of each range, in the order in which the ranges were added."""
        return tuple(self._ranges)

    def __contains__(self, quorum_id: int | None) -> bool:
        if quorum_id is not None:
            for first, last in self._ranges:
                if first <= quorum_id <= last:
                    return True
        return False

    def add_quorum(self, quorum_id: int) -> None:
        if quorum_id in self:
            return
        if self._ranges and self._ranges[-1][1] == quorum_id - 1:
            self._ranges[-1] = (self._ranges[-1][0], quorum_id)
        else:
            self._ranges = [*self._ranges, (quorum_id, quorum_id)][-RANGES_KEPT:]


@dataclass(frozen=True, slots=True)
class Lineage:
    """Participants with their assigned steps, and the tag (max_step, tag_quorum_id) of the up-to-date state."""

    participants: tuple[Participant, ...]
    max_step: int
    tag_quorum_id: int | None


def tag_of(participant: Participant, last: LastAssignment | None) -> int | None:
    """Return the id of the quorum under which the participant's state was committed, or None if unknown.

    The id is 0 at step 0. If the participant does not report it, it follows from `last`, the group's assignment in its
    last quorum.
    """
    if participant.step == 0:
        return 0
    if participant.tag_quorum_id is not None or last is None:
        return participant.tag_quorum_id
    if last.was_at is not None and participant.step >= last.was_at:
        return None  # the participant may not have healed
    if participant.step > last.max_step:
        return last.quorum_id
    return last.tag_quorum_id if participant.step == last.max_step else None


@dataclass(frozen=True, slots=True)
class Claim:
    """State that a candidate reports (`step` and `tag`), with what the lighthouse knows about the candidate."""

    step: int
    tag: int | None
    is_member: bool
    may_be_ahead: int | None = None
    """Maximum number of steps by which the state may be ahead of the last quorum, or None for no limit. If 0, the state
    must not be ahead of the members that have joined, either.
    """
    ranks_disagree: bool = False
    works_at: int | None = None
    """Step in which a member that is catching up takes part."""


def foreign(claims: Sequence[Claim], history: History, formed_at: int = 0) -> list[bool]:
    """Find the candidates that must heal because their states are outside the running job's lineage.

    Args:
        claims: States that the candidates report.
        history: Quorums under which states of this job were committed.
        formed_at: Highest step in the last quorum when it formed.

    Returns:
        A flag per candidate, in the order of `claims`: True if it must heal. All False in a cold start (rule 1 above).
    """
    is_named = [claim.tag in history for claim in claims]
    members = [
        claim
        for claim, named in zip(claims, is_named, strict=True)
        if named and claim.is_member and claim.step and not claim.ranks_disagree
    ]
    if not members:
        return [False] * len(claims)
    furthest = max(claim.step for claim in members)
    reached = max(formed_at, furthest, *(claim.works_at or 0 for claim in members))

    def is_beyond(claim: Claim) -> bool:
        if claim.may_be_ahead is None:
            return False
        return claim.step > (reached + claim.may_be_ahead if claim.may_be_ahead else furthest)

    return [not named or is_beyond(claim) for claim, named in zip(claims, is_named, strict=True)]


def assign_steps(
    candidates: Sequence[Participant], tags: Sequence[int | None], is_foreign: Sequence[bool] | None = None
) -> Lineage:
    """Find the up-to-date state, and make all candidates with another state heal.

    A candidate heals if its step is below that of the up-to-date state, so equal or higher steps of candidates with
    another state are lowered.

    Args:
        candidates: Members of the new quorum.
        tags: The tag_quorum_id of each candidate's state, or None if unknown.
        is_foreign: Result of `foreign`. None if no candidate is foreign.
    """
    ours = [i for i in range(len(candidates)) if not (is_foreign and is_foreign[i])]
    # A group whose ranks disagree heals if there is a source. At step 0 no group is a source.
    sound = [i for i in ours if candidates[i].step and not candidates[i].ranks_disagree]
    sound = sound or ours
    max_step = max([candidates[i].step for i in sound])
    at_max = [i for i in sound if candidates[i].step == max_step]
    known: dict[int, int] = {}
    for i in at_max:
        if (tag := tags[i]) is not None:
            known[tag] = known.get(tag, 0) + 1
    tag = max(known, key=lambda quorum_id: (known[quorum_id], quorum_id)) if known else None
    good = {i for i in at_max if tags[i] == tag}
    if tag is None and not candidates[at_max[0]].ranks_disagree:
        good = {at_max[0]}
    participants = [
        candidate if i in good or candidate.step < max_step else replace(candidate, step=max(0, max_step - 1))
        for i, candidate in enumerate(candidates)
    ]
    return Lineage(tuple(participants), max_step, tag)


# Clocks of the hosts that ran a lighthouse may differ, and ids may be used faster than one per millisecond.
AHEAD_MS = 24 * 3600 * 1000
# Number of ids skipped in case another lighthouse serves this job by mistake and assigns them.
LEFT_TO_ANOTHER = 1000


class Numbering:
    """Assigns quorum ids.

    A standing quorum (whose members train many steps without joining again) always gets a new id, and so does the
    quorum after it. Any other quorum keeps the last id if the same members (id, incarnation, addresses) form it again
    and none reports a failed commit. A new id exceeds every id that was assigned or that a member has seen, so an id
    never names two lists of members, even if the journal is outdated. If a member has already seen the next id or a
    higher one, another lighthouse may be assigning ids, so LEFT_TO_ANOTHER ids are skipped.
    """

    def __init__(self, first_id: int, record: QuorumRecord | None) -> None:
        """Continue after `record`, which an earlier lighthouse stored, or begin with `first_id`."""
        self.quorum_id = record.quorum_id if record is not None else 0
        self._recorded_id = record.quorum_id if record is not None and record.quorum is not None else 0
        self._first_id = first_id
        self._own_first_id: int | None = None
        self._began_at: float | None = None

    def start_clock(self, now: float) -> float:
        """Return `now` of the first call. Make that call as soon as `first_id` has been read from the wall clock."""
        self._began_at = now if self._began_at is None else self._began_at
        return self._began_at

    def why_unassigned(self, now: float, **ids: int | None) -> InvalidRequest | None:
        """Return an error if any of `ids` (by field name) cannot be a quorum id of this job, otherwise None.

        The first id of a job is the wall-clock time in milliseconds. So an id above the last assigned one that is also
        more than a day ahead of the clock was never assigned.
        """
        by_clock = self._first_id + int((now - self.start_clock(now)) * 1000)
        for field, seen_id in ids.items():
            if seen_id is not None and seen_id > max(self.quorum_id, by_clock + AHEAD_MS):
                return InvalidRequest(
                    f"is {seen_id}; this lighthouse's ids are at {max(self.quorum_id, by_clock)} by its clock, so it "
                    "was never given out. A checkpoint that it comes from is damaged; or the clock of the lighthouse "
                    "was wrong when it started: set it, and start the lighthouse again",
                    field=field,
                )
        return None

    def is_unknown(self, seen_id: int) -> bool:
        """Return whether the id is neither in the restored record nor assigned by this lighthouse."""
        own = self._own_first_id is not None and self._own_first_id <= seen_id <= self.quorum_id
        return seen_id > self._recorded_id and not own

    def choose_id(self, seen_id: int, *, is_repeated: bool) -> bool:
        """Choose the id of a quorum that forms. Return False if the quorum keeps the last id.

        Args:
            seen_id: Highest id that a member has seen. A new id is higher.
            is_repeated: Whether the quorum may keep the last id.
        """
        if is_repeated and seen_id <= self.quorum_id:
            return False
        next_id = max(self._first_id, self.quorum_id + 1)
        self.quorum_id = next_id if seen_id < next_id else seen_id + LEFT_TO_ANOTHER
        self._own_first_id = self._own_first_id or self.quorum_id
        return True


def size_for(candidates: int, allowed_sizes: Set[int], active: int | None) -> int:
    """Return the largest allowed size of a quorum with this number of candidates, or 0 if no size is allowed.

    An empty `allowed_sizes` allows every size. `active` is the maximum size, or None if there is no maximum.
    """
    most = min(candidates, active) if active is not None else candidates
    if not allowed_sizes:
        return most
    return max((size for size in allowed_sizes if size <= most), default=0)


def choose(
    candidates: Sequence[Participant], previous: Set[str], size: int, foreign: Set[str] = frozenset()
) -> list[Participant]:
    """Choose the members of a quorum whose size is limited (--allowed-replicas, --active-replicas).

    Members of the last quorum come before newcomers. Among these members, those that need not heal come first, then
    those with higher steps. Newcomers are taken in the order of their joins.

    Args:
        candidates: Candidates in the order of their joins.
        previous: The replica_ids of the last quorum's members.
        size: Number of members to choose.
        foreign: The replica_ids that must heal, whatever their step.
    """
    members = [c for c in candidates if c.replica_id in previous]
    members.sort(key=lambda c: (c.replica_id in foreign, -c.step))
    newcomers = [c for c in candidates if c.replica_id not in previous]
    return (members + newcomers)[:size]
