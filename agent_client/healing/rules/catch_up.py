"""Rules for healing while training continues (`heal_mode="catch_up"`). This module does no I/O.

A rank that is catching up takes part in the current steps while its own state, the *held* state, is that of an
earlier step. The rank contributes zeros, keeps the averaged gradients of each committed step (a *kept step*), and
fetches a snapshot of a peer's state in the background. Then it installs the snapshot and applies the kept steps in
order, until its state is the current one.

1. A state is identified by its tag (step, quorum_id of the commit). The tags of the kept steps form a chain that begins
   with the snapshot's tag. The rank can continue under a new quorum only if the quorum's first state is in this chain.
   The rank then drops the steps kept after that state, because the other groups have not committed them. Otherwise, or
   if that state has no known tag, the rank starts over with a new snapshot and a chain from the quorum's first step.
2. So the chain remains valid when the quorum changes, and never contains a discarded step.
3. If a transfer fails, the rank also starts over. Only a new quorum can assign another source, so the manager requests
   a new quorum. After MAX_TRIES failures, or without memory for another kept step, the rank heals in blocking mode: the
   other groups wait for it.
4. If a quorum begins at the held state, or if this group does not catch up in the quorum, the rank drops the kept steps
   and the snapshot, and works with the held state.
5. At most APPLIED_AT_ONCE kept steps are applied per training step, and none in the step that installs the snapshot,
   because the other groups wait for this rank in their next collective.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from lighthouse_protocol.messages.membership import Assignment, Tag

MAX_TRIES = 3
MAX_KEPT_STEPS = 1000
APPLIED_AT_ONCE = 2

T = TypeVar("T")


class Transfer(StrEnum):
    UNDER_WAY = "under_way"
    ARRIVED = "arrived"
    FAILED = "failed"
    DONE = "done"  # the snapshot is installed, or none is needed


@dataclass(frozen=True, slots=True)
class PendingStep(Generic[T]):
    tag: Tag  # tag of the state after the step
    batches: int
    content: T  # gradients to apply, which these rules do not read


class CatchUpAction(StrEnum):
    GO_ON = "go_on"
    FETCH = "fetch"  # fetch a snapshot from the assigned source
    RETURN = "return"  # stop catching up and continue with the held state


@dataclass(slots=True)
class CatchUpMachine(Generic[T]):
    held: Tag | None = None  # tag of the held state, or None if the rank is not catching up
    transfer: Transfer = Transfer.DONE
    source: str = ""  # replica_id of the group that sends the snapshot
    heals_blocking: bool = False  # whether the next heal is in blocking mode
    begins: Tag = field(default=Tag(0, None))
    """First tag of the chain, which identifies the state to which the first kept step must be applied."""
    _kept: deque[PendingStep[T]] = field(default_factory=deque[PendingStep[T]])
    _failures: int = 0
    _catches_up: bool = False

    @property
    def is_catching_up(self) -> bool:
        """True while the rank takes part in steps that are later than its own state."""
        return self.held is not None

    @property
    def has_source(self) -> bool:
        """True if the rank is catching up in the current quorum, and its snapshot has arrived or is being fetched."""
        return self._catches_up and self.transfer is not Transfer.FAILED

    @property
    def peer_tag(self) -> Tag:
        """Tag of the other groups' current state: that of the last kept step or, if none is kept, `begins`."""
        return self._kept[-1].tag if self._kept else self.begins

    @property
    def kept_steps(self) -> Sequence[PendingStep[T]]:
        return tuple(self._kept)

    @property
    def can_keep(self) -> bool:
        return self.is_catching_up and self.has_source

    # -- events

    def choose_action(self, assignment: Assignment, holds: Tag) -> CatchUpAction:
        """Decide what to do in a step, given the answer to the request for its quorum.

        Args:
            assignment: This rank's assignment in the quorum.
            holds: Tag of the rank's state. Only used if the rank is not catching up yet.
        """
        self._catches_up = assignment.catches_up
        begins = Tag(assignment.max_step, assignment.tag_quorum_id)
        if not assignment.catches_up:
            return self._return()
        if not self.is_catching_up and _is_same(holds, begins):
            return CatchUpAction.GO_ON
        if not self.is_catching_up:
            self.held = holds
            return self._start(assignment, begins)
        if self.transfer is Transfer.UNDER_WAY and self.source not in assignment.replica_ids:
            self.record_failure()
        if self.transfer is Transfer.FAILED or not self._cut(begins):
            return self._start(assignment, begins)
        return self._return() if self.transfer is Transfer.DONE and not self._kept else CatchUpAction.GO_ON

    def record_commit(self, kept: PendingStep[T] | None, tag: Tag) -> None:
        """Record that the current step has been committed.

        Args:
            kept: The step with its gradients, or None if there is no memory for them or no snapshot to apply them to.
            tag: Tag of the state after the step.
        """
        if kept is not None and self.has_source and len(self._kept) < MAX_KEPT_STEPS:
            self._kept.append(kept)
            return
        if self.has_source:
            self.record_failure(is_hopeless=True)
        self.begins = tag

    def record_arrival(self, tag: Tag) -> None:
        """Record that the complete snapshot has arrived. `tag` identifies its state."""
        if self.transfer is Transfer.UNDER_WAY:
            self.transfer, self.begins = Transfer.ARRIVED, tag

    def record_failure(self, *, is_hopeless: bool = False) -> None:
        """Record that the transfer has failed. If `is_hopeless`, heal in blocking mode next instead of trying again."""
        self._failures += 1
        self.heals_blocking |= is_hopeless or self._failures >= MAX_TRIES
        self.begins = self.peer_tag
        self._kept.clear()
        self.transfer = Transfer.FAILED

    def mark_torn(self) -> None:
        """Record that the held state was only partly updated and therefore has no valid tag."""
        if self.held is not None:
            self.held = Tag(self.held.step, None)
        self.record_failure(is_hopeless=True)

    def record_install(self) -> None:
        self.held, self.transfer = self.begins, Transfer.DONE
        self._end_if_done()

    def due_steps(self) -> Sequence[PendingStep[T]]:
        return tuple(islice(self._kept, APPLIED_AT_ONCE)) if self.transfer is Transfer.DONE else ()

    def record_applied(self) -> None:
        self.held = self.begins = self._kept.popleft().tag
        self._end_if_done()

    # -- internal

    def _return(self) -> CatchUpAction:
        was_following, self.held = self.is_catching_up, None
        self._kept.clear()
        self.transfer, self.source = Transfer.DONE, ""
        self._failures, self.heals_blocking = 0, False
        return CatchUpAction.RETURN if was_following else CatchUpAction.GO_ON

    def _start(self, assignment: Assignment, begins: Tag) -> CatchUpAction:
        self._kept.clear()
        self.begins = begins
        if assignment.heal_from_rank is None:
            self.transfer, self.source = Transfer.FAILED, ""
            return CatchUpAction.GO_ON
        self.transfer, self.source = Transfer.UNDER_WAY, assignment.replica_ids[assignment.heal_from_rank]
        return CatchUpAction.FETCH

    def _cut(self, begins: Tag) -> bool:
        # Return whether the chain contains the tag. If so, drop the steps kept after it.
        if not any(_is_same(tag, begins) for tag in (self.begins, *(kept.tag for kept in self._kept))):
            return False
        while not _is_same(self.peer_tag, begins):
            self._kept.pop()
        return True

    def _end_if_done(self) -> None:
        if not self._kept:
            self.held, self.source, self._failures = None, "", 0


def _is_same(tag: Tag, other: Tag) -> bool:
    return tag == other and tag.quorum_id is not None
