"""A quorum -> what it means for one rank: its place, who heals from whom, whose store.

A pure function of the quorum and the group_rank, the one that torchft computes too, so that every manager of a quorum
comes to the same answer. Participants below max_step heal. With `init_sync`, at step 0, everybody but the primary
takes the primary's state. Sources are dealt round-robin, offset by group_rank; the i-th healing participant is
served by up-to-date participant (i + group_rank) mod their number; the next few in that order stand in for it.

A participant that heals counts in that very step, if every participant says that it knows of such (heals_first), and
this one takes the state over before it computes anything. One that would do so too late is dealt no source: it adds
zeros, and heals under the next quorum, which therefore comes after this one step.

Those that heal in one step share the state out, MAX_SHARING of them at a time: each takes its share from the sources
and hands it on to the others. Here, too, all must say whether they heal first: torchft's groups cannot do that.

In a quorum that stands, a participant below max_step that says so catches up: it heals beside its steps, contributes
to none of them until the next quorum, and is dealt no source if it has one already.
"""

from collections.abc import Sequence
from dataclasses import replace

from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum

MAX_OTHER_SOURCES = 4
MAX_SHARING = 16
"""So many targets at most share a state out: each is connected to all others."""


def assign(
    quorum: Quorum, wire_id: str, group_rank: int, init_sync: bool, *, stands: bool = False
) -> Assignment | None:
    """None if no participant is called `wire_id`.

    torchft has each group_rank start from another group's state. Where every participant sends tags, as our Agents do,
    all ranks start from one group's, so that the ranks of a group hold parts of one and the same model. A group without
    a tag because its ranks disagree is of that kind, too.
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
        shares_with=_sharing(members, mine, healing) if all_say else (),
    )


def is_for_one_step(quorum: Quorum, init_sync: bool, group_world_size: int) -> bool:
    """Whether a participant of this quorum, which stands, is told to heal too late to do so in its first step. The next
    one is to come after that. All managers come to the same answer."""
    members = quorum.participants
    if not _all_say(members):
        return False
    max_step, _ = _at_max(members)
    ranks = range(group_world_size if max_step == 0 else 1)  # after step 0 they are all dealt with alike
    behind = {i for group_rank in ranks for i in _behind(members, group_rank, init_sync)}
    return any(not members[i].heals_first and not _catches_up(members[i], max_step, stands=True) for i in behind)


def _at_max(members: tuple[Participant, ...]) -> tuple[int, list[int]]:
    max_step = max(member.step for member in members)
    return max_step, [i for i, member in enumerate(members) if member.step == max_step]


def _all_say(members: tuple[Participant, ...]) -> bool:
    return all(member.heals_first is not None for member in members)


def _sharing(members: tuple[Participant, ...], mine: int, healing: Sequence[int]) -> tuple[str, ...]:
    """The managers of those among which this one shares the state out; empty in its own place."""
    if mine not in healing:
        return ()
    first = healing.index(mine) // MAX_SHARING * MAX_SHARING
    together = healing[first : first + MAX_SHARING]
    return tuple("" if i == mine else members[i].address for i in together) if len(together) > 1 else ()


def _catches_up(member: Participant, max_step: int, *, stands: bool) -> bool:
    return stands and member.catch_up and member.step < max_step


def _origin(members: tuple[Participant, ...], at_max: list[int], group_rank: int) -> int:
    """Whose state all start from. One whose ranks disagree has none, if there is another."""
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
