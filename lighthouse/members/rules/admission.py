"""May this join come in? One function, all the reasons to say no; a refusal changes nothing.

A member on a loopback beside a routable one (reachability.py) is refused; if it came first, it is sent away.
"""

from lighthouse.members.rules.reachability import is_loopback, unreachable
from lighthouse.members.rules.roster import Member, Roster
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import RESTARTING
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LighthouseError, LimitReached, WrongState


def refusal(
    participant: Participant,
    roster: Roster,
    *,
    max_replicas: int,
    allow_heterogeneous: bool,
    session: int | None = None,
    is_hello: bool = False,
    is_starting: bool = False,
) -> LighthouseError | None:
    """Why `participant` may not join beside those in `roster`; None if it may. That it speaks for its group is known
    (identity.py). `session`: it asks by that one, and may take another incarnation there. `is_hello`: it opens one.
    `is_starting`: none of its ranks has come, and if they have no Agent none will.
    """
    old = roster.get(participant.replica_id)
    if (old is None or old.is_reported) and roster.present >= max_replicas:
        return LimitReached(
            f"replica_id: {participant.replica_id} would be replica group number {roster.present + 1}; "
            f"the lighthouse takes {max_replicas} (--max-members)"
        )
    return (
        (None if session is not None and old is not None and old.session == session else _duplicate(participant, old))
        or (None if is_hello else _backwards(participant, old))
        or (None if allow_heterogeneous or is_starting else _misfit(participant, roster))
        or _loopback(participant, roster)
    )


def sent_away(participant: Participant, roster: Roster) -> list[tuple[Member, WrongState]]:
    """The loopback members that an admitted routable `participant` makes unreachable."""
    if is_loopback(participant) is not False:
        return []
    members = [roster.get(name) for name in sorted(roster.loopback) if name != participant.replica_id]
    return [(m, unreachable(m.participant, participant)) for m in members if m is not None and m.participant]


def _duplicate(participant: Participant, old: Member | None) -> DuplicateReplica | None:
    if old is None or old.participant is None or old.call is None or old.is_connected:
        return None
    before = old.participant
    same = (
        before.incarnation == participant.incarnation
        if participant.incarnation
        else before.identity == participant.identity
    )
    if same:
        return None
    return DuplicateReplica(
        f"replica_id: {participant.replica_id} is in use: {before.address or 'no address'} "
        "waits for a quorum, "
        f"{participant.address or 'no address'} asks for one; give each replica group its own ID"
    )


def _backwards(participant: Participant, old: Member | None) -> InvalidRequest | None:
    """A group whose ranks disagree has said so, and heals: one of them may still be getting what an earlier incarnation
    of the group was told to heal to."""
    if not participant.incarnation or participant.ranks_disagree or old is None or old.participant is None:
        return None
    before = old.participant
    # It may have been told to heal to an older state than its own, and that, where it catches up, some quorums ago.
    told = old.last_told
    lowest = before.step if told is None else min(before.step, told.max_step if told.lowest is None else told.lowest)
    if before.incarnation != participant.incarnation or participant.step >= lowest:
        return None
    return InvalidRequest(
        f"of {participant.replica_id} went from {before.step} back to {participant.step}; "
        "a group that lost its state needs a new incarnation (restart its manager)",
        field="step",
    )


def _misfit(participant: Participant, roster: Roster) -> WrongState | None:
    if participant.group_world_size == 0:
        return None
    for size, names in roster.sizes.items():
        if size == participant.group_world_size:
            continue
        trains = {name for name in names if not _awaits_first_ranks(roster.get(name))}
        if other := _another(trains, participant):
            return WrongState(
                f"world_size: {participant.replica_id} has {participant.group_world_size} ranks, {other} has {size}: "
                "their ranks hold different shards and cannot be peers; replica groups of one job need the same size, "
                "or one rank each that gathers and scatters the group's state (--group-world-size 1), unless the "
                "lighthouse runs with --allow-heterogeneous; if these are two jobs, give each its own --job"
            )
    return None


def _awaits_first_ranks(member: Member | None) -> bool:
    """A group that no Agent has joined for: it may be a run of wrapped functions, which has no peers."""
    return member is not None and member.is_starting and member.down != RESTARTING


def _loopback(participant: Participant, roster: Roster) -> WrongState | None:
    if not is_loopback(participant):
        return None
    other = roster.get(_another(roster.routable, participant) or "")
    return unreachable(participant, other.participant) if other is not None and other.participant else None


def _another(names: set[str], participant: Participant) -> str | None:
    """The first of `names` that is not the participant's own."""
    if len(names) == 1 and participant.replica_id in names:
        return None
    return min(names - {participant.replica_id}, default=None)
