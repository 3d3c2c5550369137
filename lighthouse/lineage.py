"""Who is up to date.

A state is named by its tag: (step, quorum_id under which that step was committed). At the highest step the largest
set of equal tags is up to date (ties: the highest quorum_id in the tag). A member at that step with another tag, and
one whose ranks disagree, is handed out with a lower step; so every manager, torchft's too, computes one and the same
assignment from steps alone.

Where nobody at the highest step has a known tag (torchft's members that resumed from disk, or whose past is unknown
here) they may have come apart: the first is the source, and the others heal. At step 0 there is nothing
to tell apart.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lighthouse.roster import Handed
from protos.membership import Participant


@dataclass(frozen=True, slots=True)
class Lineage:
    """`participants` as they are handed out; the tag (max_step, tag_quorum_id) of those that are up to date."""

    participants: tuple[Participant, ...]
    max_step: int
    tag_quorum_id: int | None


def tag_of(participant: Participant, handed: Handed | None) -> int | None:
    """The quorum under which the participant's state was committed; None: not known."""
    if participant.step == 0:
        return 0
    if participant.tag_quorum_id is not None or handed is None:
        return participant.tag_quorum_id
    if participant.step > handed.max_step:
        return handed.quorum_id
    return handed.tag_quorum_id if participant.step == handed.max_step else None


def hand_out(candidates: Sequence[Participant], tags: Sequence[int | None]) -> Lineage:
    """`tags[i]` is the tag_quorum_id of `candidates[i]`."""
    # Who disagrees heals, unless there is nobody to heal from: at step 0 there is not.
    sound = [i for i, candidate in enumerate(candidates) if candidate.step and not candidate.ranks_disagree]
    sound = sound or list(range(len(candidates)))
    max_step = max(candidates[i].step for i in sound)
    at_max = [i for i in sound if candidates[i].step == max_step]
    known = Counter(tag for i in at_max if (tag := tags[i]) is not None)
    tag = max(known, key=lambda quorum_id: (known[quorum_id], quorum_id)) if known else None
    good = {i for i in at_max if tags[i] == tag}
    if tag is None and not candidates[at_max[0]].ranks_disagree:
        good = {at_max[0]}
    handed = tuple(
        candidate if i in good or candidate.step < max_step else replace(candidate, step=max(0, max_step - 1))
        for i, candidate in enumerate(candidates)
    )
    return Lineage(handed, max_step, tag)
