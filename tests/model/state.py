"""The state of the model: records that an action changes in a copy, and tuples that the explorer stores.

A group is a replica group with its manager. It holds the model's state under a tag (step, quorum_id), as the protocol
names states. `content` stands for the bits of that state: it depends on every step that the state went through, so two
states under one tag are equal only if their contents are.
"""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

NOTHING = -1
"""No quorum, no lighthouse, no report."""

# What a manager may do under the quorum that it holds, as it reports it.
NO_QUORUM, STANDS, RECALLED, RESUMED, JOINING, REVOKED = "none", "stands", "recalled", "resumed", "joining", "revoked"
# A lighthouse's quorum has the same phases, and this one after a restart.
RETURNING = "returning"

# A step in progress.
HEALS, COMPUTES, LATE, HAS_SUM = "heals", "computes", "adds zeros", "has the sum"


class Join(NamedTuple):
    """A group's request for the next quorum."""

    incarnation: int
    step: int
    tag: int  # quorum_id of the state's tag
    is_torn: bool
    has_failed: bool
    seen: int  # highest quorum_id that the manager has received
    begins: bool  # the ranks have begun to compute, because they committed their last step


class Report(NamedTuple):
    """What a manager holds, as it says in each heartbeat."""

    quorum: int
    mode: str
    granted: int


class Quorum(NamedTuple):
    """A quorum, named by its place in `World.quorums`. The id is what the processes see."""

    quorum_id: int
    members: tuple[tuple[int, int], ...]  # group and incarnation
    start: int  # step that it was formed for
    tag: int
    joins: tuple[Join, ...]  # of the members
    history: frozenset[int]
    term: int  # of the lighthouse that formed it
    branch_id: int = 0  # the newest quorum up to this one that began below the start of the one before it
    is_told: bool = False
    has_lost_record: bool = False  # a rolled-back journal lacks it
    reduced: int = NOTHING  # last step whose all-reduce completed
    committed: int = NOTHING  # last step that a group committed
    parts: tuple[tuple[Any, ...], ...] = ()  # by member: (step, state) that it may have sent before it gave up or died


def has_late(quorum: Quorum) -> bool:
    """Return whether a member learns too late that it must heal. Then all members join after the first step."""
    return any(is_late(quorum, join) for join in quorum.joins)


def is_late(quorum: Quorum, join: Join) -> bool:
    return join.begins and (join.step, join.tag) != (quorum.start, quorum.tag)


@dataclass(slots=True, eq=False)
class Group:
    """The explorer stores it as the tuple of its fields."""

    incarnation: int = 0
    step: int = 0
    tag: int = 0
    content: int = 0
    is_torn: bool = False
    work: tuple[int, int, str] | tuple[()] = ()  # quorum, step, progress
    has_failed: bool = False  # its last step was discarded
    begins: bool = False  # its ranks compute before they receive the quorum
    quorum: int = NOTHING  # the one that its manager holds
    mode: str = NO_QUORUM
    granted: int = 0
    upto: int = 0  # last step to grant, if resumed
    seen: int = 0
    has_lease: bool = False
    link: int = NOTHING  # the lighthouse that it is connected to
    asks: bool = False  # it waits for a quorum
    mail: int = NOTHING  # quorum in an answer that is under way to it
    drains: bool = False
    has_left: bool = False
    discards: int = 0

    def freeze(self) -> tuple[Any, ...]:
        return _group(self)

    def join(self) -> Join:
        return Join(self.incarnation, self.step, self.tag, self.is_torn, self.has_failed, self.seen, self.begins)

    def forget(self) -> None:
        """Clear what a manager knows. Its ranks may live on."""
        self.incarnation += 1
        self.begins = False
        self.quorum, self.mode, self.granted, self.upto = NOTHING, NO_QUORUM, 0, 0
        self.seen, self.has_lease, self.link, self.asks, self.mail = 0, False, NOTHING, False, NOTHING


_group = attrgetter(*(field.name for field in fields(Group)))


@dataclass(slots=True, eq=False)
class Lighthouse:
    """One process. Fields after `seen` have an entry for each group: lists here, and tuples for the explorer."""

    term: int  # 0 while it does not lead
    phase: str
    quorum: int  # its last one
    upto: int
    needs_recall: bool
    unwritten: int  # quorum whose record the store has not acknowledged
    seen: int  # highest quorum_id that a member has reported
    session: list[int]  # incarnation that is connected
    joins: list[Join | None]
    lease: list[bool]  # the group's member of the quorum may hold a lease
    unknown: list[bool]  # the group may hold a lease of a quorum that this lighthouse does not know
    heard: list[bool]  # it has reported since the start
    back: list[bool]  # it has confirmed since the start that it holds the quorum
    granted: list[int]  # highest grant, reported since the recall
    spent: list[bool]  # it grants no more
    untold: list[bool]  # its answer has not been sent

    @classmethod
    def thaw(cls, state: tuple[Any, ...]) -> "Lighthouse":
        return cls(*[list(value) if type(value) is tuple else value for value in state])

    def freeze(self) -> tuple[Any, ...]:
        return tuple([tuple(value) if type(value) is list else value for value in _lighthouse(self)])


_lighthouse = attrgetter(*(field.name for field in fields(Lighthouse)))


def new_lighthouse(groups: int) -> tuple[Any, ...]:
    no = (False,) * groups
    nothing = (NOTHING,) * groups
    return (0, NO_QUORUM, NOTHING, 0, False, NOTHING, 0, nothing, (None,) * groups, no, no, no, no, nothing, no, no)


class World:
    """A copy of a state that an action may change."""

    __slots__ = ("groups", "is_late", "journal", "left", "lighthouses", "quorums", "term", "under_way")

    def __init__(self, state: tuple[Any, ...]) -> None:
        groups, lighthouses, self.quorums, self.journal, self.term, self.under_way, self.left, self.is_late = state
        self.groups = [Group(*values) for values in groups]
        self.lighthouses = [Lighthouse.thaw(values) for values in lighthouses]
        # quorums: all that formed. journal: places of the recorded ones, the newest last. term: of the present leader.
        # under_way: a deposed leader's write (quorum, term). left: the faults that may still happen, by kind.
        # is_late: some message or group has missed a deadline.

    def freeze(self) -> tuple[Any, ...]:
        return (
            tuple([group.freeze() for group in self.groups]),
            tuple([lighthouse.freeze() for lighthouse in self.lighthouses]),
            self.quorums,
            self.journal,
            self.term,
            self.under_way,
            self.left,
            self.is_late,
        )

    def change(self, quorum: int, **fields: Any) -> None:
        quorums = list(self.quorums)
        quorums[quorum] = quorums[quorum]._replace(**fields)
        self.quorums = tuple(quorums)

    def incarnation_in(self, quorum: int, group: int) -> int | None:
        """Return the group's incarnation in a quorum, or None if it is no member."""
        if quorum == NOTHING:
            return None
        return dict(self.quorums[quorum].members).get(group)

    def is_member(self, quorum: int, group: int) -> bool:
        return self.incarnation_in(quorum, group) == self.groups[group].incarnation

    def serves(self, lighthouse: int) -> bool:
        """Return whether that lighthouse leads."""
        return lighthouse != NOTHING and self.lighthouses[lighthouse].term > 0


def new_world(groups: int, lighthouses: int, left: tuple[int, ...]) -> tuple[Any, ...]:
    return ((Group().freeze(),) * groups, (new_lighthouse(groups),) * lighthouses, (), (), 0, (), left, False)
