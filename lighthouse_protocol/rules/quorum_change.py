"""What a manager is told that holds a quorum already: what has changed, in place of a list as long as the job.

1. A quorum is named by a digest of all that it says. Whoever names the same one holds the same quorum, order and all. A
   manager names the last one that it was told in its join, and is told what has changed since that one alone.
2. A change lists who has gone, who is new, and who has changed in a way of its own. All others are who they were at the
   same addresses, and have come to one and the same state (step, tag and what else a join says): it is told once.
3. A change names what is to come of it. Where something else does, nothing does, and the whole list is asked for.
4. A list that is not in the order of its ids, each once, has no changes: it is told whole.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter

from lighthouse_protocol.messages.membership import Participant, Quorum, QuorumChange

_WHO = (
    "replica_id",
    "incarnation",
    "wire_id",
    "address",
    "store_address",
    "group_world_size",
    "data",
    "resolves_to_loopback",
    "extras",
)
_STATE = tuple(f.name for f in fields(Participant) if f.name not in (*_WHO, "wire"))
_who, _state, _all = attrgetter(*_WHO), attrgetter(*_STATE), attrgetter(*_WHO, *_STATE)


@dataclass(frozen=True, slots=True)
class NamedQuorum:
    quorum: Quorum
    digest: str

    @classmethod
    def of(cls, quorum: Quorum) -> "NamedQuorum":
        said = repr((quorum.quorum_id, *map(_all, quorum.participants)))
        return cls(quorum, hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest())


def change_between(old: Quorum, new: NamedQuorum) -> QuorumChange | None:
    """None: it would be no shorter than the list."""
    before, after = old.participants, new.quorum.participants
    if not (_is_ordered(before) and _is_ordered(after)):
        return None
    known = {member.wire_id: _who(member) for member in before}
    states = Counter(_state(member) for member in after if known.get(member.wire_id) == _who(member))
    if not states:
        return None
    [(common, _)] = states.most_common(1)
    alike = [m for m in after if known.get(m.wire_id) == _who(m) and _state(m) == common]
    names, alike_names = {m.wire_id for m in after}, {m.wire_id for m in alike}
    return QuorumChange(
        new.digest,
        new.quorum.quorum_id,
        like=alike[0],
        gone=tuple(at for at, member in enumerate(before) if member.wire_id not in names),
        members=tuple(member for member in after if member.wire_id not in alike_names),
    )


def changed(old: Quorum, change: QuorumChange) -> NamedQuorum | None:
    """None: `change` is not about `old`."""
    told = {member.wire_id for member in change.members}
    gone = set(change.gone)
    state = dict(zip(_STATE, _state(change.like), strict=True))
    stayed = (
        replace(member, **state)
        for at, member in enumerate(old.participants)
        if at not in gone and member.wire_id not in told
    )
    participants = sorted((*stayed, *change.members), key=attrgetter("wire_id"))
    made = NamedQuorum.of(Quorum(change.quorum_id, tuple(participants)))
    return made if made.digest == change.digest else None


def _is_ordered(participants: tuple[Participant, ...]) -> bool:
    return all(one.wire_id < other.wire_id for one, other in pairwise(participants))
