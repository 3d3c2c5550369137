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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lighthouse.members.rules.roster import LastQuorumTold
from lighthouse_protocol.messages.membership import Participant

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
