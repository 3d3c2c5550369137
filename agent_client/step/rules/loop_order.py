"""Which call of a training loop begins a step. Pure.

A forward pass of a module that goes through the Agent does, and so do a reduction and the vote: whatever comes first.
A zero_grad() at the top of the loop does too, so that a rank that heals has its peers' state before anything reads the
old one. A zero_grad() at the end of the loop must not: an evaluation, a checkpoint or the end of training may follow.

Where a forward pass will begin the step, zero_grad() need not: that is right in loops of either order. Elsewhere the
first call tells the order: a loop whose first step had computed before its optimizer was zeroed zeroes at its end.

A script that leaves out a step (an exception that it catches, a loss that is not a number) goes on with the next
forward pass, as one does that accumulates, takes two passes (SAM), or computes several outputs for one loss. PassOrder
tells these apart by what the script did in the steps that it committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class StepPart(Protocol):
    """A module whose forward passes begin steps, and whose backward passes reduce in them."""

    @property
    def begins_steps(self) -> bool:
        """Whether its next forward pass begins a step: it is in training mode."""
        ...

    @property
    def order(self) -> "PassOrder": ...

    @property
    def has_abandoned(self) -> bool:
        """Whether what a forward pass of this step has computed is freed, and no backward pass went through it."""
        ...

    @property
    def parameters_reduced(self) -> Sequence[Any]:
        """The parameters whose gradients it reduces."""
        ...

    def pass_over(self) -> bool:
        """Reduce zeros in place of the gradients of the step's batch. Whether it could: nothing was reduced yet."""
        ...

    def give_up(self) -> None:
        """A backward pass that was reducing never came to its end; the step will be voted no.

        Raises AgentError where this module cannot go on."""
        ...

    def agree(self) -> None:
        """All of a step is computed; its vote comes next. What must be equal in all replica groups is reduced now."""
        ...

    def settle(self, *, is_committed: bool) -> None:
        """The step is over: keep what was agreed on, or go back to what there was when it began."""
        ...


@dataclass(slots=True)
class ZeroGradOrder:
    """Of one optimizer. `ends_loop`: None until its first call has told."""

    ends_loop: bool | None = None

    def zeroes(self, *, has_computed: bool, forward_begins: bool) -> bool:
        """Whether this zero_grad() begins a step. `has_computed`: something was computed in the step under way."""
        if self.ends_loop is None:
            self.ends_loop = has_computed
        return not (self.ends_loop or forward_begins)

    def steps(self) -> None:
        """Its step() is called."""
        if self.ends_loop is None:
            self.ends_loop = True


@dataclass(slots=True)
class PassOrder:
    """Of one module: which of its forward passes shows that the script has left out the vote on the step under way.

    Nothing is concluded before the first committed step. A conclusion that was wrong costs one attempt: in the next one
    of the same step the script may start over, or make twice as many forward passes; and what it does in a step that is
    committed is usual from then on.
    """

    counts: bool = True
    """Whether forward passes are counted: whether one reduces is known when it begins."""
    has_reduced: bool = False
    """A backward pass of this module has reduced its gradients in this step."""
    _ended: int = -1
    _forwards: int = 0  # that reduce, since the step began or the module has reduced
    _most: int = 0  # of these in this step
    _starts_over: bool = False  # in this step
    _usual_most: int = 0
    _usually_starts_over: bool = False
    _patience: int = 1
    _step: int = -1
    _gave_up_at: int | None = None

    def sync(self, *, step: int, ended: int, was_committed: bool) -> None:
        """`step` is under way, or begins. `ended`: the number of attempts that have ended. `was_committed`: how the
        last one did."""
        self._step = step
        if ended == self._ended:
            return
        if was_committed:
            self._usual_most = max(self._usual_most, self._most, 1)
            self._usually_starts_over |= self._starts_over
            self._patience, self._gave_up_at = 1, None
        self._ended = ended
        self._forwards, self._most, self.has_reduced, self._starts_over = 0, 0, False, False

    def reduced(self) -> None:
        self.has_reduced, self._forwards = True, 0

    def forward(self) -> None:
        """A forward pass begins whose backward pass will reduce."""
        self._forwards += 1
        self._most = max(self._most, self._forwards)

    def starts_over(self) -> bool:
        """A forward pass will begin, and nothing is left of the gradients reduced in this step. Whether that shows that
        the step was left out."""
        self._starts_over = True
        is_unusual = bool(self._usual_most) and not self._usually_starts_over
        return is_unusual and self._gave_up_at != self._step

    def repeats(self) -> bool:
        """A forward pass that reduces will begin, an earlier one was abandoned, and none since the last reduction was
        followed by a backward pass. Whether that shows that the step was left out."""
        return self.counts and bool(self._usual_most) and self._forwards >= self._usual_most * self._patience

    def gave_up(self) -> None:
        """The step was discarded, since it seemed to be left out."""
        self._patience *= 2
        self._gave_up_at = self._step
