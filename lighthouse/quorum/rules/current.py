"""The present quorum: the last one that was formed, by this lighthouse or by an earlier one.

It stands here once, and the parts of the machine read it: its replica groups, which of the members that are present
belong to it, and when it was formed.
"""

from collections.abc import Container, Sequence

from lighthouse.members.rules.roster import LastQuorumTold, Member
from lighthouse_protocol.messages.membership import Quorum


class CurrentQuorum:
    """`quorum` None: none was formed yet. `formed_at` of an earlier lighthouse's: when this one first had an event."""

    def __init__(self) -> None:
        self.quorum: Quorum | None = None
        self.replica_ids: frozenset[str] = frozenset()
        self.max_step = 0  # at which it was formed
        self.formed_at: float | None = None
        self.rounds = 0
        self.changes = 0  # of the quorum_id
        self._tags: set[int | None] = set()  # of the states that it was formed from, and that it makes
        self._births: dict[str, int] = {}
        self._before: dict[tuple[str, str], LastQuorumTold] = {}  # by replica_id and incarnation
        self._secrets: dict[str, str] = {}  # digests, by replica_id; of former members that are remembered, too

    def restore(self, quorum: Quorum) -> None:
        """It was the last one before a restart of the lighthouse: each member of it that comes was told it."""
        self._set(quorum)
        told = LastQuorumTold(quorum.quorum_id, self.max_step, None, lowest=0)
        self._before = {(member.replica_id, member.incarnation): told for member in quorum.participants}

    def form(
        self,
        quorum: Quorum,
        members: Sequence[Member],
        now: float,
        *,
        is_new: bool,
        remembered: Container[str] = (),
    ) -> None:
        """`members` are its participants, in the same order; `is_new`: its id is. `remembered`: the
        replica_ids that the roster has."""
        self._before = {}
        self._births = {member.replica_id: member.birth for member in members}
        former = {name: secret for name, secret in self._secrets.items() if name in remembered}
        self._secrets = former | {member.replica_id: member.secret for member in members}
        self._set(quorum)
        self.rounds += 1
        if is_new:
            self.changes += 1
            self.formed_at = now

    def pass_time(self, now: float) -> None:
        if self.formed_at is None and self.quorum is not None:
            self.formed_at = now

    def _set(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self.replica_ids = frozenset(member.replica_id for member in quorum.participants)
        self.max_step = max(member.step for member in quorum.participants)
        sources = (member for member in quorum.participants if member.step == self.max_step)
        self._tags = {quorum.quorum_id, *(source.tag_quorum_id for source in sources)}

    def may_hold(self, replica_id: str, tag: int) -> bool:
        """Whether the ranks of that group may hold a state of that tag by this quorum, also under another manager: they
        have committed it under the quorum, or the quorum was formed from it."""
        return tag in self._tags and replica_id in self.replica_ids

    def secret_of(self, replica_id: str) -> str:
        """The digest that the manager of that group was known by when it was told a quorum last; empty: never."""
        return self._secrets.get(replica_id, "")

    def forget(self, replica_id: str) -> None:
        """No group of that name is remembered any more."""
        if replica_id not in self.replica_ids:
            self._secrets.pop(replica_id, None)

    def has(self, member: Member) -> bool:
        """This incarnation of it is a participant."""
        if self._births.get(member.replica_id) == member.birth:
            return True
        return (member.replica_id, member.incarnation) in self._before

    def told_before(self, replica_id: str, incarnation: str) -> LastQuorumTold | None:
        """What an earlier lighthouse has told that member."""
        return self._before.get((replica_id, incarnation))

    def consists_of(self, members: Sequence[Member]) -> bool:
        """It was formed here from the same members at the same addresses."""
        participants = self.quorum.participants if self.quorum is not None else ()
        return len(members) == len(participants) and all(
            self._births.get(member.replica_id) == member.birth
            and member.participant is not None
            and member.participant.identity == participant.identity
            for member, participant in zip(members, participants, strict=True)
        )
