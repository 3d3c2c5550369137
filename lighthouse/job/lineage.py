"""Which groups are up to date.

A state is named by its tag: (step, quorum_id under which that step was committed). At the highest step the largest
set of equal tags is up to date (ties: the highest quorum_id in the tag). A member at that step with another tag, and
one whose ranks disagree, is told with a lower step; so every manager, torchft's too, computes one and the same
assignment from steps alone.

A running job's history wins: while a member of the last quorum is a candidate and holds a state of this job's lineage
(its tag is a quorum that was formed here, or what the members of one held), candidates of a foreign or unknown lineage
heal, however high their step. A quorum id can be read by everybody who may view the status, so a tag alone proves
nothing: a candidate from outside that is ahead of the members is foreign, too, unless its group was told of the quorum
that its tag names, or of one that was formed from that state. Then it may be one step ahead of what the last quorum has
come to, as members are at most one step apart. Only where no such member is (a cold start) does the highest step win.

A manager that was started again below its ranks is such a candidate: they hold what they committed before. So the name
counts here, and not the incarnation. What the quorum has come to includes the step that it was formed at: its sources
held that one, while a member that was to heal may still hold an older state.

What a manager was told by an earlier lighthouse of this job, whose journal is lost or older, is of its lineage, too,
and may be ahead by any number: a group that happens to come first to a lighthouse that knows no group does not win over
those that have trained for long. That rests on a manager's word, and holds for EARLIER_COUNTS_FOR_S.

If no group at the highest step has a known tag (torchft's members that resumed from disk, or whose past is unknown
here) they may have diverged: the first is the source, and the others heal. At step 0 there is nothing
to tell apart.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from lighthouse.job.records import Group, Job, LastQuorumTold, QuorumRecord
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import InvalidRequest

RANGES_KEPT = 64
EARLIER_COUNTS_FOR_S = 600.0  # after the first quorum of this lighthouse


class History:
    """The quorum ids by which states of this job are named: ranges of them, since they are mostly consecutive."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = list(ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last, the oldest first."""
        return tuple(self._ranges)

    def __contains__(self, quorum_id: int) -> bool:
        return any(first <= quorum_id <= last for first, last in self._ranges)

    def add(self, quorum_id: int) -> None:
        if quorum_id in self:
            return
        if self._ranges and self._ranges[-1][1] == quorum_id - 1:
            self._ranges[-1] = (self._ranges[-1][0], quorum_id)
        else:
            self._ranges = [*self._ranges, (quorum_id, quorum_id)][-RANGES_KEPT:]


@dataclass(frozen=True, slots=True)
class Lineage:
    """`participants` as they are handed out; the tag (max_step, tag_quorum_id) of those that are up to date."""

    participants: tuple[Participant, ...]
    max_step: int
    tag_quorum_id: int | None


def tag_of(participant: Participant, told: LastQuorumTold | None) -> int | None:
    """The quorum under which the participant's state was committed; None: not known."""
    if participant.step == 0:
        return 0
    if participant.tag_quorum_id is not None or told is None:
        return participant.tag_quorum_id
    if told.was_at is not None and participant.step >= told.was_at:
        return None  # it may not have healed
    if participant.step > told.max_step:
        return told.quorum_id
    return told.tag_quorum_id if participant.step == told.max_step else None


@dataclass(frozen=True, slots=True)
class Claim:
    """What the lighthouse knows of a candidate that says it is at `step`, in the state that `tag` names."""

    step: int
    tag: int | None
    is_member: bool
    may_be_ahead: int | None = None
    """Steps by which it may be ahead of the last quorum; None for any number; 0: not even of the members that ask."""
    ranks_disagree: bool = False
    works_at: int | None = None
    """The step that a member catching up takes part in."""


def foreign(claims: Sequence[Claim], history: History, formed_at: int = 0) -> list[bool]:
    """Find the candidates that are not of the running job's lineage, and heal; none where no job is running.

    Args:
        claims: One for each candidate.
        history: The quorums by which states of this job are named.
        formed_at: The step that the last quorum was formed at.
    """
    is_named = [claim.tag is not None and claim.tag in history for claim in claims]
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
    """`tags[i]` is the tag_quorum_id of `candidates[i]`; `is_foreign` says `foreign`."""
    ours = [i for i in range(len(candidates)) if not (is_foreign and is_foreign[i])]
    # A group that disagrees heals, unless there is no source: at step 0 there is none.
    sound = [i for i in ours if candidates[i].step and not candidates[i].ranks_disagree]
    sound = sound or ours
    max_step = max(candidates[i].step for i in sound)
    at_max = [i for i in sound if candidates[i].step == max_step]
    known = Counter(tag for i in at_max if (tag := tags[i]) is not None)
    tag = max(known, key=lambda quorum_id: (known[quorum_id], quorum_id)) if known else None
    good = {i for i in at_max if tags[i] == tag}
    if tag is None and not candidates[at_max[0]].ranks_disagree:
        good = {at_max[0]}
    participants = tuple(
        candidate if i in good or candidate.step < max_step else replace(candidate, step=max(0, max_step - 1))
        for i, candidate in enumerate(candidates)
    )
    return Lineage(participants, max_step, tag)


# -- numbering ----------------------------------------------------------------
#
# Which quorum_id the members that form a quorum get.
#
# A quorum that does not stand keeps its id while the same members (id, incarnation, addresses) form it and none
# reports a failed commit; one that stands, or follows one that stood, always gets a new one. A new id is above every
# id that was formed, above every one that a member was told, and at or above `first_id`: so that it names one list
# for ever, also where what is remembered is older than what was told. Where a member was told one that would be given
# out here only later, another lighthouse may be giving out the next ones at this moment: they are left to it.

# Clocks of two hosts on which a lighthouse has run may differ, and ids may be used faster than milliseconds pass.
AHEAD_MS = 24 * 3600 * 1000
# Of another lighthouse that serves this job by mistake. It ends by that, or is told of these.
LEFT_TO_ANOTHER = 1000


class Numbering:
    """`quorum_id` is the highest that was given out; 0 before any."""

    def __init__(self, first_id: int, record: QuorumRecord | None, job: Job) -> None:
        """`first_id`: the lowest that a new quorum may get. `record`: what an earlier lighthouse has written down."""
        self.quorum_id = record.quorum_id if record is not None else 0
        self._recorded_id = self.quorum_id
        self._first_id = first_id
        self._own_first_id: int | None = None
        self._began_at: float | None = None
        self._job = job

    def check(self, seen_id: int, field: str, now: float) -> None:
        """Raises InvalidRequest for an id that no lighthouse of this job can have given out.

        Ids begin at the wall clock in milliseconds: one that is a day above it and above the last one was never told.
        """
        self._began_at = now if self._began_at is None else self._began_at
        by_clock = self._first_id + int((now - self._began_at) * 1000)
        if seen_id > max(self.quorum_id, by_clock + AHEAD_MS):
            raise InvalidRequest(
                f"is {seen_id}; this lighthouse's ids are at {max(self.quorum_id, by_clock)} by its clock, so it was "
                "never given out. A checkpoint that it comes from is damaged; or the clock of the lighthouse was wrong "
                "when it started: set it, and start the lighthouse again",
                field=field,
            )

    def is_unknown(self, seen_id: int) -> bool:
        """A member was told an id that was neither written down before this life nor given out in it."""
        own = self._own_first_id is not None and self._own_first_id <= seen_id <= self.quorum_id
        return seen_id > self._recorded_id and not own

    def number(self, chosen: Sequence[Group], seen_id: int, *, always: bool) -> bool:
        """`chosen` form a quorum: whether its id is new. `seen_id`: the highest that a member was told."""
        has_failed = any(member.participant is not None and member.participant.commit_failures > 0 for member in chosen)
        is_same = self._job.consists_of(chosen) and not has_failed and not always
        if is_same and seen_id <= self.quorum_id:
            return False
        next_id = max(self._first_id, self.quorum_id + 1)
        self.quorum_id = next_id if seen_id < next_id else seen_id + LEFT_TO_ANOTHER
        self._own_first_id = self._own_first_id or self.quorum_id
        return True


# -- selection ----------------------------------------------------------------
#
# Which of the candidates a quorum takes, where its size is limited (--allowed-replicas, --active-replicas).
#
# Members of the previous quorum first, an up-to-date one at their head, then those that wait longest.


def size_for(candidates: int, allowed_sizes: Set[int], active: int | None) -> int:
    """The largest allowed size of a quorum with this number of candidates; 0: none."""
    most = min(candidates, active) if active is not None else candidates
    if not allowed_sizes:
        return most
    return max((size for size in allowed_sizes if size <= most), default=0)


def choose(
    candidates: Sequence[Participant], previous: Set[str], size: int, foreign: Set[str] = frozenset()
) -> list[Participant]:
    """`candidates` in the order in which they came; `previous` the replica_ids of the last quorum.

    `foreign`: those that are to heal, whatever their step (lineage.py).
    """
    if len(candidates) <= size:
        return list(candidates)
    members = [c for c in candidates if c.replica_id in previous]
    members.sort(key=lambda c: (c.replica_id in foreign, -c.step))
    newcomers = [c for c in candidates if c.replica_id not in previous]
    return (members + newcomers)[:size]
