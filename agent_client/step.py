"""One rank's step: asked -> (reconfigure) -> (heal) -> compute -> vote -> commit or discard. No I/O.

A failure inside a step marks it: the vote is no, the optimizer does not move, the next quorum repairs. The state is
named by its tag (step, quorum_id of its commit). While a healed state is being installed there is no tag: a rank that
is interrupted there holds nothing, and heals.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from agent_client.world_size import NO_SHARE, Share, WorldSize
from protos.membership import Assignment, Tag

HISTORY_KEPT = 16


class Phase(StrEnum):
    IDLE = "idle"
    ASKED = "asked"
    COMPUTING = "computing"
    VOTED = "voted"


class InvalidTransition(RuntimeError):
    """A defect: something happened in a phase in which it cannot. The message tells the story."""


@dataclass(slots=True)
class StepMachine:
    """`discards` counts those since the last commit under a quorum; `failure` says why this step cannot commit;
    `share` is this group's part of the step; `is_alone`: this rank is the only one of its group."""

    step: int = 0
    tag_quorum_id: int | None = 0
    batches_committed: int = 0
    phase: Phase = Phase.IDLE
    assignment: Assignment | None = None
    failure: str | None = None
    discards: int = 0
    has_erred: bool = False
    has_reduced: bool = False
    must_install: bool = False
    is_torn: bool = False
    is_alone: bool = False
    world_size: WorldSize = field(default_factory=WorldSize)
    share: Share = NO_SHARE
    _began_with: Tag | None = None
    _history: list[str] = field(default_factory=list)

    @property
    def tag(self) -> Tag:
        """Of the state that this rank works at."""
        return Tag(self.step, self.tag_quorum_id)

    def begin(self) -> None:
        """A step begins, and not only a further try of one."""
        self._began_with = self.tag

    @property
    def is_salvageable(self) -> bool:
        """Whether the step's gradients are still those of the state that this rank holds."""
        return not self.has_erred and self.tag == self._began_with

    def ask(self) -> None:
        self._move("ask", Phase.IDLE, to=Phase.ASKED)
        self.assignment = None
        self.share = self.world_size.share(None)
        self.failure = None
        self.has_erred = False
        self.has_reduced = False
        self.must_install = False

    def answered(self, assignment: Assignment) -> None:
        self._move("answered", Phase.ASKED, to=Phase.COMPUTING)
        self.assignment = assignment
        self.share = self.world_size.share(assignment)
        self.must_install = assignment.heals and not assignment.catches_up

    def unanswered(self, reason: str) -> None:
        """There is no quorum for this step; it will be discarded."""
        self._move("unanswered", Phase.ASKED, to=Phase.COMPUTING)
        self.failure = reason

    def passed_over(self) -> None:
        """A quorum was revoked before this step began under it; another one is asked for."""
        self.discards += 1

    def lost_between(self, reason: str) -> None:
        """The participants have lost each other while they did something else together: they need another quorum."""
        if self.phase is Phase.IDLE:
            self.discards += 1
        else:
            self.failed(reason)

    def erred(self, reason: str) -> None:
        """The script says so: what it has computed is of no use."""
        self.has_erred = True
        self.failed(reason)

    def failed(self, reason: str) -> None:
        """The first reason stays."""
        if self.failure is None:
            self.failure = reason

    @property
    def contributes(self) -> bool:
        """Whether this rank's gradients count: it holds the state of max_step, is no spare, and nothing has failed."""
        return self.share.counts and self.failure is None

    def reduced(self) -> None:
        """An all-reduce over all participants has completed in this step."""
        self.has_reduced = True

    def installing(self) -> None:
        """The first byte of a peer's state is about to be written."""
        self.tag_quorum_id = None
        self.is_torn = True

    def installed(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None:
        self.step = step
        self.tag_quorum_id = tag_quorum_id
        self.batches_committed = batches_committed
        self.must_install = False
        self.is_torn = False

    def work_at(self, step: int, tag_quorum_id: int | None) -> None:
        """It catches up, or does so no more: the state that it works at is that one, whichever it holds."""
        self.step, self.tag_quorum_id = step, tag_quorum_id

    def vote(self) -> bool:
        """A yes needs a quorum, a completed all-reduce over all its participants, and a state that is up to date."""
        self._move("vote", Phase.COMPUTING, to=Phase.VOTED)
        if self.failure is None and not self.has_reduced:
            self.failed("no collective over all participants completed")
        if self.is_torn:
            self.failed("the state of a peer was installed in part")
        if self.failure is None and self.must_install:
            self.failed("the state of a peer was not installed")
        return self.failure is None

    @property
    def has_decided(self) -> bool:
        """Whether the vote is the decision: a yes, and no other rank of the group that could say no."""
        return self.phase is Phase.VOTED and self.failure is None and self.is_alone

    def decided(self, commit: bool) -> None:
        self._move("commit" if commit else "discard", Phase.VOTED, to=Phase.IDLE)
        assignment = self.assignment
        if commit and assignment is not None:
            self.step += 1
            self.tag_quorum_id = assignment.quorum_id
            self.batches_committed += self.share.divisor
            self.discards = 0
        elif assignment is not None:
            self.discards += 1

    def _move(self, what: str, expected: Phase, *, to: Phase) -> None:
        self._history = [*self._history[1 - HISTORY_KEPT :], f"{what}@{self.step}"]
        if self.phase is not expected:
            raise InvalidTransition(f"{what} in phase {self.phase}, not {expected}; so far: {' '.join(self._history)}")
        self.phase = to
