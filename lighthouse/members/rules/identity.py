"""May this caller speak for that replica group? A session is bound to the manager that has opened it.

1. A manager makes a secret when it starts, and shows it in each of its hellos. What is kept of it is its digest.
2. While a session of a group is open, or its connection was cut together with those of most others (silence.py),
   only a hello with its secret takes its place, whatever incarnation it shows, and joins and heartbeats without a
   session are refused. Otherwise the name is free when the session has ended, by a leave, by its connection's end, or
   by silence: the manager of a group that is started anew knows no secret, and need not wait for more than that.
3. An incarnation belongs to the manager that came with it first, for as long as the group is remembered, also after its
   session has ended: another manager takes an incarnation of its own, and by that it has promised nothing.
4. While a quorum of an earlier lighthouse returns (standing.py), its members are going on, and come back: their names
   are theirs until then. They are known by the digests that the record has of them.
5. By the same secret a supervisor, which serves as its group's manager, shows that its group is a member of the quorum:
   what it asks for then counts for its whole run (runs/rules/supervisors.py).
"""

from dataclasses import dataclass
from enum import Enum

from lighthouse.members.rules.roster import Member
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, Unreachable
from lighthouse_protocol.rules.proof import is_same, is_shown


@dataclass(frozen=True, slots=True)
class Remembered:
    """A member of the quorum that stands or stood: its incarnation, and the digest of its secret. `is_awaited`: the
    lighthouse has restarted, and it has not come back."""

    incarnation: str
    secret: str
    is_awaited: bool = False


class Membership(Enum):
    """Of a replica group in the quorum of its job, as far as a secret shows."""

    MEMBER = "member"
    OUTSIDER = "outsider"  # others are members, and this one has never been told a quorum
    OPEN = "open"  # nobody is: none was formed, or all that were in it are gone


def membership_of(digest: str, known: str, remembered: Remembered | None, *, is_held: bool) -> Membership:
    """`digest`: of the secret that was shown; `known`: of the manager of that name that was told a quorum last.
    `is_held`: a member of the quorum is alive, or may come back to it."""
    if is_same(digest, known) or (remembered is not None and is_same(digest, remembered.secret)):
        return Membership.MEMBER
    return Membership.OUTSIDER if is_held else Membership.OPEN


def why_impostor(
    participant: Participant, secret: str, old: Member | None, remembered: Remembered | None, *, is_cut: bool = False
) -> LighthouseError | None:
    """Why the caller does not speak for the group that it names; None: it may. `secret`: empty for a call that has no
    session. `old`, `remembered`: what is known of the group of that name; `is_cut`: it is held, as MassSilence says."""
    name, kept = participant.replica_id, old.secret if old is not None else ""
    if old is not None and old.is_connected:
        return None if is_shown(secret, kept) else _in_use(participant, old)
    if is_cut and not is_shown(secret, kept):
        return Unreachable(
            f"replica_id: the connection of {name} was cut together with most others, and its manager may reconnect; "
            "another manager of this name is admitted once it counts as lost: ask again"
        )
    awaited = remembered.secret if remembered is not None and remembered.is_awaited else ""
    if awaited and not is_shown(secret, awaited):
        return Unreachable(
            f"replica_id: {name} is a member of the quorum that the lighthouse held before it restarted, and may "
            "reconnect until that quorum's lease expires; another manager of this name is admitted then: ask again"
        )
    if not participant.incarnation:
        return None
    for incarnation, digest in _known(old, remembered):
        if digest and incarnation == participant.incarnation and not is_shown(secret, digest):
            return DuplicateReplica(
                f"replica_id: {name} with incarnation {participant.incarnation} is another manager than the one at "
                f"{participant.address or 'no address'}; restart this one, so that it gets its own"
            )
    return None


def _known(old: Member | None, remembered: Remembered | None) -> list[tuple[str, str]]:
    ours = [(old.incarnation, old.secret)] if old is not None else []
    return ours + ([(remembered.incarnation, remembered.secret)] if remembered is not None else [])


def _in_use(participant: Participant, old: Member) -> DuplicateReplica:
    address = old.participant.address if old.participant is not None else ""
    return DuplicateReplica(
        f"replica_id: {participant.replica_id} is in use: {address or 'no address'} holds a session, "
        f"{participant.address or 'no address'} asks for one; give each replica group its own ID. If the "
        "other one died, the name is free as soon as the lighthouse has detected that"
    )
