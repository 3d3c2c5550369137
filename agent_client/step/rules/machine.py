"""State machine of one rank's training step. This module does no I/O.

    asked -> (reconfigure) -> (heal) -> compute -> vote -> commit or discard

1. A rank whose last step was not committed may have to *heal*, that is, copy the state of a peer. The rank waits for
   its quorum before it computes anything, so that the script does the whole step with the peer's state.
2. If a rank only learns that it must heal after it has begun to compute, it contributes zeros to the step, votes no,
   and heals before its next step.
3. The first failure inside a step decides its result: the vote is no, the optimizer does not step, and the next quorum
   connects the participants again.
4. A model state is identified by its *tag*: the number of committed steps, and the quorum_id under which the last of
   them was committed. While a peer's state is being installed, the rank has no tag. If the installation is interrupted,
   the rank holds no complete state and heals.
5. A state is *torn* if a committed step was not applied to it, or if it differs from the peers' state with the same
   tag. The rank then also has no tag. `distrust` contains the reason until the rank has healed.

`Applying` finds committed steps that were not applied.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent_client.step.rules.world_size import NO_SHARE, Share, WorldSize
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.membership import Assignment, Distrust, DistrustKind, Tag

HISTORY_KEPT = 16


class Phase(StrEnum):
    IDLE = "idle"
    ASKED = "asked"
    COMPUTING = "computing"
    VOTED = "voted"


class InvalidTransition(RuntimeError):
    """Raised for an event that is impossible in the current phase: a bug. The message lists the last events."""


@dataclass(slots=True)
class StepMachine:
    step: int = 0
    tag_quorum_id: int | None = 0
    """Id of the quorum under which the state was committed, or None if this rank holds no complete state."""
    batches_committed: int = 0
    phase: Phase = Phase.IDLE
    assignment: Assignment | None = None
    """Assignment in the quorum of the current or last step."""
    failure: str | None = None
    is_blamed: bool = False
    """True if another group caused `failure`."""
    discards: int = 0
    """Number of discarded steps since the last committed step."""
    faults: int = 0
    """Number of discarded steps since the last committed step that no other group is known to have caused."""
    has_erred: bool = False
    has_reduced: bool = False
    """True if an all-reduce over all participants has completed in this step."""
    reductions: int = 0
    """Number of reductions that the script has requested in this step."""
    has_computed: bool = False
    """True if a forward pass or a reduction has begun in this step."""
    skips_batch: bool = False
    """True if the script skips this rank's batch, so the rank contributes zeros and does not count."""
    skipped_weight: int = 0
    """Number of skipped microbatches in the step, summed over all groups."""
    is_in_backward: bool = False
    was_committed: bool = False
    commits: int = 0
    ended: int = 0
    moves: int = 0
    """Number of forward passes, reductions and votes of this process."""
    accumulates: bool = False
    """True if the last forward pass only accumulates gradients, so its backward pass reduces nothing."""
    may_heal: bool = True
    """True if the next quorum may require this rank to heal."""
    heals_first: bool = False
    """True if this rank can heal within this step, because it requested the quorum before it computed anything."""
    must_install: bool = False
    """True if a peer's state must be installed before this rank's gradients count."""
    is_torn: bool = False
    is_installing: bool = False
    distrust: Distrust | None = None
    """Reason why the state is torn, or None. An interrupted installation of a peer's state sets no reason."""
    torn_under: int | None = None
    is_alone: bool = False
    world_size: WorldSize = field(default_factory=WorldSize)
    share: Share = NO_SHARE
    shares: tuple[int, ...] = ()
    """Number of microbatches of each contributor, or empty without `share_by_speed`."""
    _began_with: Tag | None = None
    _history: list[str] = field(default_factory=list)

    @property
    def tag(self) -> Tag:
        return Tag(self.step, self.tag_quorum_id)

    @property
    def has_peers(self) -> bool:
        return self.assignment is not None and self.assignment.replica_world_size > 1

    @property
    def next_step(self) -> int | None:
        """Number of the next step to compute, or None if work on the current step has already begun."""
        has_begun = self.phase is not Phase.IDLE and (self.has_computed or self.has_reduced or self.must_install)
        return None if has_begun or self.phase is Phase.VOTED else self.step

    def begin(self) -> None:
        """Record the tag of the state with which a new step begins. Do not call this for a retry of the same step."""
        self._began_with = self.tag

    @property
    def is_salvageable(self) -> bool:
        """True if this step's gradients were computed with this rank's current state, so they may be reduced again."""
        return not self.has_erred and not self.must_install and self.tag == self._began_with

    def ask(self, *, heals_first: bool = False) -> None:
        self._move("ask", Phase.IDLE, to=Phase.ASKED)
        self.heals_first = heals_first
        self.assignment = None
        self.share = self.world_size.share(None)
        self.failure = None
        self.is_blamed = False
        self.has_erred = False
        self.has_reduced = False
        self.reductions = 0
        self.has_computed = False
        self.is_in_backward = False
        self.skips_batch = False
        self.skipped_weight = 0
        self.must_install = False

    def accept_assignment(self, assignment: Assignment) -> None:
        self._move("accept_assignment", Phase.ASKED, to=Phase.COMPUTING)
        self.assignment = assignment
        self.share = self.world_size.share(assignment, self.shares)
        self.must_install = (assignment.heals or assignment.place is None) and not assignment.catches_up

    def set_shares(self, shares: tuple[int, ...]) -> None:
        """Set the number of microbatches of each contributor. Call this before the script draws its batches."""
        self.shares = shares
        self.share = self.world_size.share(self.assignment, shares)

    def record_quorum_failure(self, reason: str) -> None:
        self._move("no_quorum", Phase.ASKED, to=Phase.COMPUTING)
        self.failure = reason

    def record_loss_between_steps(self, reason: str) -> None:
        """Record that participants have been lost between two steps, so the next step needs another quorum."""
        if self.phase is Phase.IDLE:
            self.discards += 1
        else:
            self.fail_step(reason)

    def record_error(self, reason: str) -> None:
        self.has_erred = True
        self.fail_step(reason)

    def fail_step(self, reason: str, *, is_blamed: bool = False) -> None:
        """Record that the step has failed, and whether another group is to blame. Only the first failure is kept."""
        if self.failure is None:
            self.failure, self.is_blamed = reason, is_blamed

    def record_compute(self, *, accumulates: bool = False) -> None:
        """Record that a forward pass or a reduction is beginning. `accumulates` is True if no reduction will follow."""
        self.has_computed = True
        self.accumulates = accumulates
        self.moves += 1

    def abandon_backward(self) -> None:
        """Fail the step after an unfinished backward pass, because the next reduction would not match the peers'."""
        self.is_in_backward = False
        self.record_error("a backward pass was abandoned before it had reduced all gradients")

    @property
    def contributes(self) -> bool:
        """True if this rank's gradients count: it holds the current state, is not a spare and has not failed."""
        return self.share.counts and self.failure is None and not self.must_install

    @property
    def divisor(self) -> int:
        return self.share.divisor - self.skipped_weight

    @property
    def batches(self) -> int:
        """Number of batches drawn for the step, summed over all groups, including skipped ones.

        If skipped batches did not count, samplers would draw the last batches of this step again in the next step.
        """
        return self.share.divisor

    def record_reduction(self) -> None:
        self.has_reduced = True

    def begin_install(self) -> None:
        self.tag_quorum_id = None
        self.is_torn = self.is_installing = True

    def finish_install(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None:
        self.step = step
        self.tag_quorum_id = tag_quorum_id
        self.batches_committed = batches_committed
        self.must_install = False
        self.is_torn = self.is_installing = False
        self.distrust = None
        self.may_heal = True

    def tear(self, kind: DistrustKind, text: str) -> None:
        """Record that this rank's state is invalid, and why. Keep the first reason until the rank has healed."""
        self.distrust = self.distrust or Distrust(kind, cut_reason(text))
        if self.tag_quorum_id is not None:
            self.distrust = replace(self.distrust, step=self.step, quorum_id=self.tag_quorum_id)
        self.tag_quorum_id = None
        self.is_torn = True
        self.torn_under = self.assignment.quorum_id if self.assignment is not None else None
        if self.phase is not Phase.IDLE:
            self.fail_step(text)
        elif self.is_alone:
            # Force another quorum. With several ranks this is impossible: the others may already be in the next step.
            self.discards += 1

    @property
    def is_unhealed(self) -> bool:
        """True if the state is torn (invalid) but the quorum considers it current. The step cannot be committed."""
        if self.assignment is None:
            return False
        return self.is_torn and not self.must_install and not self.assignment.catches_up

    @property
    def has_no_heal_source(self) -> bool:
        """True if the state is torn (invalid), and the quorum that formed afterwards has no peer to heal from."""
        return self.is_unhealed and self.assignment is not None and self.assignment.quorum_id != self.torn_under

    def work_at(self, step: int, tag_quorum_id: int | None) -> None:
        """Set the step, and the quorum id of the tag, with which this rank takes part.

        While the rank is catching up, they are those of its peers, and its own state is older.
        """
        self.step, self.tag_quorum_id = step, tag_quorum_id

    def vote(self) -> bool:
        """Return this rank's vote. A yes (True) requires a quorum, a completed all-reduce and an up-to-date state."""
        self._move("vote", Phase.COMPUTING, to=Phase.VOTED)
        if self.failure is None and not self.has_reduced:
            self.fail_step("no collective over all participants completed")
        if self.is_installing:
            self.fail_step("the state of a peer was installed in part")
        if self.is_torn and self.distrust is not None:
            self.fail_step(f"no peer's state was installed, and this rank has none: {self.distrust.text}")
        if self.failure is None and self.must_install:
            self.fail_step("this group holds another state than its peers; it heals before its next step")
        return self.failure is None

    @property
    def must_heal_next(self) -> bool:
        """True if this rank had begun to compute before it learned that it must heal, and has not healed since."""
        return self.phase is Phase.IDLE and self.must_install and not self.heals_first

    @property
    def has_decided(self) -> bool:
        """True if this rank has voted yes and is the only rank in its group, so its vote is the decision."""
        return self.phase is Phase.VOTED and self.failure is None and self.is_alone

    def record_decision(self, commit: bool) -> None:
        self._move("commit" if commit else "discard", Phase.VOTED, to=Phase.IDLE)
        self.has_computed = False
        self.was_committed = commit and self.assignment is not None
        self.ended += 1
        self.moves += 1
        assignment = self.assignment
        if commit and assignment is not None:
            self.step += 1
            self.tag_quorum_id = assignment.quorum_id
            self.batches_committed += self.batches
            self.commits += 1
            self.discards = self.faults = 0
        elif assignment is not None:
            self.discards += 1
        self.may_heal = not commit or assignment is None

    def _move(self, what: str, expected: Phase, *, to: Phase) -> None:
        self._history = [*self._history[1 - HISTORY_KEPT :], f"{what}@{self.step}"]
        if self.phase is not expected:
            raise InvalidTransition(f"{what} in phase {self.phase}, not {expected}; so far: {' '.join(self._history)}")
        self.phase = to


@dataclass(slots=True)
class Applying:
    """Finds committed steps that were not applied.

    A commit changes the step and the tag immediately, but the state changes only when the optimizer steps. These cases
    show that the optimizer did not step, or only in part, which leaves the state torn:

    1. An exception is raised between `entered` and `left`. FaultTolerantOptimizer, LocalSGD, DiLoCo and the block
       `with agent.applying()` call these two methods.
    2. A script calls its optimizers itself, and when the next step begins, a registered optimizer has begun more steps
       since the commit than it has finished. So a step raised, even if the script caught the exception and tried again.
       (A step that calls the step of its base class is counted twice as begun and twice as finished.)
    3. A script calls its optimizers itself, and none steps after a commit. This counts only if, so far, registered
       optimizers have stepped exactly once after each commit, because a script may also take local steps or apply the
       gradients in another way. It does not count with a GradScaler, which may skip a step on all ranks.
    """

    is_explicit: bool = False
    """True once `entered` has been called. Optimizer steps are then ignored."""
    _committed: int | None = None  # committed step that is not applied yet
    _under_way: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _stepped: set[int] = field(default_factory=set[int])
    _expects: bool = False
    _takes_local_steps: bool = False
    _may_skip: bool = False

    def note_commit(self, step: int) -> None:
        self._committed = step
        self._under_way, self._stepped = Counter(), set()

    def entered(self) -> None:
        self.is_explicit = True

    def left(self) -> None:
        self._committed = None

    def optimizer_began(self, key: int, name: str, *, is_registered: bool) -> None:
        if self.is_explicit or not is_registered:
            return
        if key in self._stepped:
            self._takes_local_steps = True
        if self._committed is None:
            return
        self._under_way[key, name] += 1

    def optimizer_ended(self, key: int, name: str, *, is_registered: bool) -> None:
        if self.is_explicit:
            return
        self._stepped.add(key)
        if self._committed is None:
            return
        self._expects |= is_registered
        if is_registered:
            self._under_way[key, name] -= 1
        if not +self._under_way:
            self._committed = None

    def begins(self, may_skip: Callable[[], bool]) -> str:
        """Check at the beginning of a step that the last commit was applied. Return the error text, or "".

        `may_skip` returns whether a GradScaler may skip steps. It is slow, so it is called only if an optimizer step is
        missing, and never again once it has returned True.
        """
        step, self._committed = self._committed, None
        if self.is_explicit or step is None:
            return ""
        for _, name in +self._under_way:
            return f"step {step} was committed, and {name}.step() began and did not end"
        if not self._expects or self._takes_local_steps:
            return ""
        self._may_skip = self._may_skip or may_skip()
        return "" if self._may_skip else f"step {step} was committed, and no optimizer has stepped since"
