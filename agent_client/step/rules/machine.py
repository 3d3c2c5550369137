"""One rank's step: asked -> (reconfigure) -> (heal) -> compute -> vote -> commit or discard. No I/O.

A rank that may have to heal, since its last step was not committed here, waits for its quorum before it computes
anything: all that the script does in the step, it does with the peer's state. One that is told to heal when it has
begun to compute does the step with zeros, votes no, and heals before its next one.

A failure inside a step marks it: the vote is no, the optimizer does not move, the next quorum repairs. The state is
named by its tag (step, quorum_id of its commit). While a healed state is being installed there is no tag: a rank that
is interrupted there holds nothing, and heals. So does one whose state was torn otherwise: a step that was committed and
not applied, or a state that differs from that of its peers. `distrust` says why, until it has healed.
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
    """A defect: an event in a phase in which it is impossible. The message lists the last events."""


@dataclass(slots=True)
class StepMachine:
    """One rank's step."""

    step: int = 0
    tag_quorum_id: int | None = 0
    """Of the quorum that has committed the state; None: this rank holds no complete state."""
    batches_committed: int = 0
    phase: Phase = Phase.IDLE
    assignment: Assignment | None = None
    """The quorum of the step under way, or of the last one."""
    failure: str | None = None
    """Why this step cannot commit."""
    is_blamed: bool = False
    """Another group is to blame for `failure`."""
    discards: int = 0
    """Discarded steps since the last commit under a quorum."""
    faults: int = 0
    """Those of them that no other group is known to have caused."""
    has_erred: bool = False
    """The script has reported an error in this step."""
    has_reduced: bool = False
    """An all-reduce over all participants has completed in this step."""
    has_computed: bool = False
    """A forward pass or a reduction was begun in this step."""
    passes_over: bool = False
    """The script has passed over this rank's batch: it adds zeros, and does not count."""
    passed_weight: int = 0
    """Microbatches of the step that groups have passed over."""
    is_in_backward: bool = False
    """A backward pass has begun to reduce, and has not ended."""
    was_committed: bool = False
    """How the last step ended."""
    commits: int = 0
    """Steps that this rank has committed since it began."""
    ended: int = 0
    """Steps that were committed or discarded."""
    moves: int = 0
    """Grows with each forward pass, reduction and vote."""
    accumulates: bool = False
    """The last forward pass reduces nothing."""
    may_heal: bool = True
    """The next quorum may tell this rank to heal."""
    heals_first: bool = False
    """This rank can heal in this step: nothing was computed in it before its quorum was requested."""
    must_install: bool = False
    """A peer's state is to be installed before this rank counts."""
    is_torn: bool = False
    """This rank holds no complete state."""
    is_installing: bool = False
    distrust: Distrust | None = None
    """Why the state is torn, if it was not by an installation that broke."""
    torn_under: int | None = None
    """The quorum in which it was torn."""
    is_alone: bool = False
    """This rank is the only one of its group."""
    world_size: WorldSize = field(default_factory=WorldSize)
    share: Share = NO_SHARE
    """This group's part of the step."""
    _began_with: Tag | None = None
    _history: list[str] = field(default_factory=list)

    @property
    def tag(self) -> Tag:
        """Of the state that this rank works at."""
        return Tag(self.step, self.tag_quorum_id)

    @property
    def next_step(self) -> int | None:
        """The first step of which nothing has been computed; None: a step is half done."""
        has_begun = self.phase is not Phase.IDLE and (self.has_computed or self.has_reduced or self.must_install)
        return None if has_begun or self.phase is Phase.VOTED else self.step

    def begin(self) -> None:
        """A step begins; a retry of a step does not call this."""
        self._began_with = self.tag

    @property
    def is_salvageable(self) -> bool:
        """Whether the step's gradients are those of the state that this rank holds, and that counts."""
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
        self.has_computed = False
        self.is_in_backward = False
        self.passes_over = False
        self.passed_weight = 0
        self.must_install = False

    def answered(self, assignment: Assignment) -> None:
        self._move("answered", Phase.ASKED, to=Phase.COMPUTING)
        self.assignment = assignment
        self.share = self.world_size.share(assignment)
        self.must_install = (assignment.heals or assignment.place is None) and not assignment.catches_up

    def unanswered(self, reason: str) -> None:
        """There is no quorum for this step; it will be discarded."""
        self._move("unanswered", Phase.ASKED, to=Phase.COMPUTING)
        self.failure = reason

    def passed_over(self) -> None:
        """A quorum was revoked before this step began under it; another one is asked for."""
        self.discards += 1

    def lost_between(self, reason: str) -> None:
        """Participants were lost between two steps: the next step needs another quorum."""
        if self.phase is Phase.IDLE:
            self.discards += 1
        else:
            self.failed(reason)

    def erred(self, reason: str) -> None:
        """The script reports that what it has computed is of no use."""
        self.has_erred = True
        self.failed(reason)

    def failed(self, reason: str, *, is_blamed: bool = False) -> None:
        """The first reason stays. `is_blamed`: another group is to blame."""
        if self.failure is None:
            self.failure, self.is_blamed = reason, is_blamed

    def computes(self, *, accumulates: bool = False) -> None:
        """A forward pass that trains, or a reduction, begins in this step."""
        self.has_computed = True
        self.accumulates = accumulates
        self.moves += 1

    def gives_up(self) -> None:
        """A backward pass that was reducing never came to its end: what it has reduced is of no use, and what the peers
        reduce next is not what this rank would."""
        self.is_in_backward = False
        self.erred("a backward pass was abandoned before it had reduced all gradients")

    @property
    def contributes(self) -> bool:
        """Whether this rank's gradients count: it holds the state of max_step, is no spare, and nothing has failed."""
        return self.share.counts and self.failure is None and not self.must_install

    @property
    def divisor(self) -> int:
        """Number of microbatches whose gradients are in the step's sums."""
        return self.share.divisor - self.passed_weight

    def reduced(self) -> None:
        """An all-reduce over all participants has completed in this step."""
        self.has_reduced = True

    def installing(self) -> None:
        """The first byte of a peer's state is about to be written."""
        self.tag_quorum_id = None
        self.is_torn = self.is_installing = True

    def installed(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None:
        self.step = step
        self.tag_quorum_id = tag_quorum_id
        self.batches_committed = batches_committed
        self.must_install = False
        self.is_torn = self.is_installing = False
        self.distrust = None
        self.may_heal = True

    def tear(self, kind: DistrustKind, text: str) -> None:
        """This rank holds no complete state any more. The first reason stays until it has healed."""
        self.distrust = self.distrust or Distrust(kind, cut_reason(text))
        if self.tag_quorum_id is not None:
            self.distrust = replace(self.distrust, step=self.step, quorum_id=self.tag_quorum_id)
        self.tag_quorum_id = None
        self.is_torn = True
        self.torn_under = self.assignment.quorum_id if self.assignment is not None else None
        if self.phase is not Phase.IDLE:
            self.failed(text)
        elif self.is_alone:
            self.discards += 1  # asks for another quorum; other ranks of the group may be in the next step already

    @property
    def is_unhealed(self) -> bool:
        """Whether the state is torn and the quorum takes it for up to date: this step cannot commit."""
        if self.assignment is None:
            return False
        return self.is_torn and not self.must_install and not self.assignment.catches_up

    @property
    def cannot_heal(self) -> bool:
        """Whether the quorum was formed after this rank reported its torn state: no peer can give it a state."""
        return self.is_unhealed and self.assignment is not None and self.assignment.quorum_id != self.torn_under

    def work_at(self, step: int, tag_quorum_id: int | None) -> None:
        """Work at that state while catching up, whichever state is held; or at the held one again."""
        self.step, self.tag_quorum_id = step, tag_quorum_id

    def vote(self) -> bool:
        """A yes needs a quorum, a completed all-reduce over all its participants, and a state that is up to date."""
        self._move("vote", Phase.COMPUTING, to=Phase.VOTED)
        if self.failure is None and not self.has_reduced:
            self.failed("no collective over all participants completed")
        if self.is_installing:
            self.failed("the state of a peer was installed in part")
        if self.is_torn and self.distrust is not None:
            self.failed(f"no peer's state was installed, and this rank has none: {self.distrust.text}")
        if self.failure is None and self.must_install:
            self.failed("this group holds another state than its peers; it heals before its next step")
        return self.failure is None

    @property
    def was_told_late(self) -> bool:
        """This rank was told to heal when it had begun to compute, and has not healed since."""
        return self.phase is Phase.IDLE and self.must_install and not self.heals_first

    @property
    def has_decided(self) -> bool:
        """Whether the vote is the decision: a yes, and no other rank of the group that could say no."""
        return self.phase is Phase.VOTED and self.failure is None and self.is_alone

    def decided(self, commit: bool) -> None:
        self._move("commit" if commit else "discard", Phase.VOTED, to=Phase.IDLE)
        self.has_computed = False
        self.was_committed = commit and self.assignment is not None
        self.ended += 1
        self.moves += 1
        assignment = self.assignment
        if commit and assignment is not None:
            self.step += 1
            self.tag_quorum_id = assignment.quorum_id
            self.batches_committed += self.divisor
            self.commits += 1
            self.discards = self.faults = 0
        elif assignment is not None:
            self.discards += 1
        self.may_heal = not commit or assignment is None

    def faulted(self) -> None:
        """The step that was discarded last: no other group is known to have caused it."""
        self.faults += 1

    def _move(self, what: str, expected: Phase, *, to: Phase) -> None:
        self._history = [*self._history[1 - HISTORY_KEPT :], f"{what}@{self.step}"]
        if self.phase is not expected:
            raise InvalidTransition(f"{what} in phase {self.phase}, not {expected}; so far: {' '.join(self._history)}")
        self.phase = to


# -- applying -----------------------------------------------------------------
#
# Whether a step that was committed was applied, too. No I/O.
#
# A commit moves step and tag; the state follows when the optimizer has stepped. What comes between leaves the state
# torn:
#
# 1. Inside `entered` and `left` (FaultTolerantOptimizer, LocalSGD, DiLoCo, a script's own `with agent.applying()`):
#    an exception.
# 2. In a script that steps its optimizers by itself: a registered one that has begun to step after a commit, and has
#    not ended as often by the next step: an exception that the script has caught, also where it has tried again. (The
#    step of a class may call that of the one it is derived from: torch tells of both.)
# 3. There, too: a commit after which nothing steps. That is expected only of a script whose registered optimizers
#    have stepped after each commit so far and never twice: one that takes local steps, or applies by other means,
#    does as it likes. A GradScaler may skip, which every rank does alike: the caller knows.


@dataclass(slots=True)
class Applying:
    """`is_explicit`: the script says when it applies, so optimizers are not looked at."""

    is_explicit: bool = False
    _committed: int | None = None  # the step that was committed and not applied yet
    _under_way: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _stepped: set[int] = field(default_factory=set[int])
    _expects: bool = False
    _takes_local_steps: bool = False
    _may_skip: bool = False

    def committed(self, step: int) -> None:
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
        """A step begins: what is wrong with the last commit; empty: nothing. `may_skip` may take long: it is asked only
        where something is, and no more once it has said yes."""
        step, self._committed = self._committed, None
        if self.is_explicit or step is None:
            return ""
        for _, name in +self._under_way:
            return f"step {step} was committed, and {name}.step() began and did not end"
        if not self._expects or self._takes_local_steps:
            return ""
        self._may_skip = self._may_skip or may_skip()
        if self._may_skip:
            return ""
        return f"step {step} was committed, and no optimizer has stepped since"
