"""Catching up: a rank trains along from its first step, and takes over a peer's state beside that. Rules only, no I/O.

A rank that catches up works at the quorum's step and *holds* the state of an older one. It contributes nothing, keeps
the averaged gradients of each committed step, and fetches the snapshot of a peer in the background. The snapshot is
installed, the kept steps are applied to it in order; then it holds what it works at.

1. A state is named by its tag: (step, quorum_id of the commit). The kept steps are a chain of tags that begins at the
   snapshot's, and a quorum is trained along with only from a tag of that chain: what was kept beyond it, others have
   not committed. A quorum that begins anywhere else (or from a state without a known tag) starts anew: from its own
   step, with a new snapshot.
2. So the chain outlives quorums, and a step that was discarded is not in it.
3. A transfer that fails starts anew, too; a new source takes a new quorum, for which the manager is told. After
   MAX_TRIES of them, and where there is no room for another step, the rank heals plainly: the others wait for it then.
4. In a quorum that begins with what is held, and in one in which this group does not catch up, only what is held
   counts: all else is forgotten.
5. A step applies at most APPLIED_AT_ONCE steps, and none in the one in which the snapshot is installed: the others wait
   in their next collective for what this takes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from lighthouse_protocol.messages.membership import Tag

MAX_TRIES = 3
MAX_KEPT_STEPS = 1000
APPLIED_AT_ONCE = 2

T = TypeVar("T")


class Transfer(StrEnum):
    """Of the snapshot that the kept steps begin at. DONE: it is installed, or none is needed."""

    UNDER_WAY = "under_way"
    ARRIVED = "arrived"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PendingStep(Generic[T]):
    """A committed step that waits to be applied; `tag` is that of the state after it, `content` what is applied."""

    tag: Tag
    batches: int
    content: T


@dataclass(frozen=True, slots=True)
class CatchUpPlan:
    """A quorum, as far as catching up goes: the state that it begins with, whether this group catches up in it,
    whether a source is dealt to it, and the names of its participants."""

    begins: Tag
    catches_up: bool
    deals_source: bool
    names: Sequence[str]


class Turn(StrEnum):
    """What a quorum means. FETCH: from the source that it deals; RETURN: to the state that is held."""

    GO_ON = "go_on"
    FETCH = "fetch"
    RETURN = "return"


@dataclass(slots=True)
class CatchUpMachine(Generic[T]):
    """`held` is None where this rank holds what it works at. `source` names the group that the snapshot comes from."""

    held: Tag | None = None
    transfer: Transfer = Transfer.DONE
    source: str = ""
    heals_plainly: bool = False
    _begins: Tag = field(default=Tag(0, None))
    _kept: deque[PendingStep[T]] = field(default_factory=deque[PendingStep[T]])
    _failures: int = 0
    _catches_up: bool = False

    @property
    def follows(self) -> bool:
        """Whether this rank works at another state than it holds."""
        return self.held is not None

    @property
    def has_source(self) -> bool:
        """In the quorum that was answered last this rank catches up, and what it needs is on its way, or here."""
        return self._catches_up and self.transfer is not Transfer.FAILED

    @property
    def begins(self) -> Tag:
        """The state that the kept steps are applied to."""
        return self._begins

    @property
    def followed(self) -> Tag:
        """The state that this rank works at, where it is not the one that it holds."""
        return self._kept[-1].tag if self._kept else self._begins

    @property
    def kept(self) -> Sequence[PendingStep[T]]:
        return tuple(self._kept)

    @property
    def keeps(self) -> bool:
        """Whether the step under way is to be kept, if it commits."""
        return self.follows and self.has_source

    # -- what happens

    def answered(self, plan: CatchUpPlan, holds: Tag, source: str = "") -> Turn:
        """A quorum begins, or goes on. `holds` is the state that this rank works at, and holds if it does not follow;
        `source` the group that is dealt."""
        self._catches_up = plan.catches_up
        if not plan.catches_up:
            return self._return()
        if not self.follows and _is_same(holds, plan.begins):
            return Turn.GO_ON
        if not self.follows:
            self.held = holds
            return self._start(plan, source)
        if self.transfer is Transfer.UNDER_WAY and self.source not in plan.names:
            self.failed()
        if self.transfer is Transfer.FAILED or not self._cut(plan.begins):
            return self._start(plan, source)
        return self._return() if self.transfer is Transfer.DONE and not self._kept else Turn.GO_ON

    def committed(self, kept: PendingStep[T] | None, tag: Tag) -> None:
        """The step under way; None: there was no room, or nothing to keep it for."""
        if kept is not None and self.has_source and len(self._kept) < MAX_KEPT_STEPS:
            self._kept.append(kept)
            return
        if self.has_source:
            self.failed(is_hopeless=True)
        self._begins = tag

    def arrived(self, tag: Tag) -> None:
        """The whole snapshot is here."""
        if self.transfer is Transfer.UNDER_WAY:
            self.transfer, self._begins = Transfer.ARRIVED, tag

    def failed(self, *, is_hopeless: bool = False) -> None:
        """The snapshot cannot be had, or not used; `is_hopeless`: nor another one."""
        self._failures += 1
        self.heals_plainly |= is_hopeless or self._failures >= MAX_TRIES
        self._begins = self.followed
        self._kept.clear()
        self.transfer = Transfer.FAILED

    def torn(self) -> None:
        """What is held was written in part."""
        if self.held is not None:
            self.held = Tag(self.held.step, None)
        self.failed(is_hopeless=True)

    def installed(self) -> None:
        self.held, self.transfer = self._begins, Transfer.DONE
        self._end_if_done()

    def due(self) -> Sequence[PendingStep[T]]:
        """What is to be applied in the step under way."""
        return tuple(islice(self._kept, APPLIED_AT_ONCE)) if self.transfer is Transfer.DONE else ()

    def applied(self) -> None:
        """The first of those that are kept."""
        self.held = self._begins = self._kept.popleft().tag
        self._end_if_done()

    # -- within

    def _return(self) -> Turn:
        was_following, self.held = self.follows, None
        self._kept.clear()
        self.transfer, self.source = Transfer.DONE, ""
        self._failures, self.heals_plainly = 0, False
        return Turn.RETURN if was_following else Turn.GO_ON

    def _start(self, plan: CatchUpPlan, source: str) -> Turn:
        self._kept.clear()
        self._begins, self.source = plan.begins, source
        self.transfer = Transfer.UNDER_WAY if plan.deals_source else Transfer.FAILED
        return Turn.FETCH if plan.deals_source else Turn.GO_ON

    def _cut(self, begins: Tag) -> bool:
        """Whether the chain holds that tag; what lies beyond it is forgotten."""
        if not any(_is_same(tag, begins) for tag in (self._begins, *(kept.tag for kept in self._kept))):
            return False
        while not _is_same(self.followed, begins):
            self._kept.pop()
        return True

    def _end_if_done(self) -> None:
        if not self._kept:
            self.held, self.source, self._failures = None, "", 0


def _is_same(tag: Tag, other: Tag) -> bool:
    return tag == other and tag.quorum_id is not None


# -- modes --------------------------------------------------------------------
#
# How a rank heals, and how it gives its state to a peer that does.


class HealMode(StrEnum):
    """BLOCKING: the other groups wait in one step until this one has its state. CATCH_UP: this group trains along
    meanwhile, and they do not wait."""

    BLOCKING = "blocking"
    CATCH_UP = "catch_up"


class StateServing(StrEnum):
    """SNAPSHOT: a copy of the state is served. HOLD: the state itself, whose next write waits for its readers. AUTO: a
    snapshot if memory allows, else HOLD."""

    AUTO = "auto"
    SNAPSHOT = "snapshot"
    HOLD = "hold"
