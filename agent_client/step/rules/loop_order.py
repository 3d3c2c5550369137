"""Detection of the step boundaries in a training loop. No I/O.

A step begins with the first forward pass of a module that goes through the Agent, the first reduction, or the vote. A
zero_grad() at the top of the loop begins it too, so that a healing rank has its peers' state before anything reads the
old one. A zero_grad() at the end of the loop must not: an evaluation, a checkpoint or the end of training may follow.

If a forward pass will begin the step, zero_grad() need not, which is right for loops of either order. Otherwise the
first call shows the order: a loop that has computed before its first zero_grad() zeroes at its end.

A script that leaves out a step (it catches an exception, or the loss is NaN) continues with the next forward pass. A
script that accumulates, takes two passes (SAM) or computes several outputs for one loss does the same. PassOrder
distinguishes these cases by what the script did in committed steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class StepPart(Protocol):
    """A module whose forward passes begin steps, and whose backward passes reduce in them."""

    @property
    def begins_steps(self) -> bool:
        """True if the next forward pass begins a step, because the module is in training mode."""
        ...

    @property
    def order(self) -> "PassOrder": ...

    @property
    def has_abandoned(self) -> bool:
        """True if the graph of a forward pass of this step is freed without a backward pass."""
        ...

    @property
    def parameters_reduced(self) -> Sequence[Any]:
        """Parameters whose gradients it reduces."""
        ...

    def contribute_zeros(self) -> bool:
        """Reduce zeros instead of the batch's gradients. Return False if something was reduced already."""
        ...

    def give_up(self) -> None:
        """Abandon a backward pass that has begun to reduce. The vote will be no.

        Raises:
            AgentError: This module cannot continue.
        """
        ...

    def agree(self) -> None:
        """Start to share values that must be equal in all groups. Called before the vote, when all is computed."""
        ...

    def end_step(self, *, is_committed: bool) -> None:
        """Keep the shared values if the step is committed, or restore those from its beginning."""
        ...


@dataclass(slots=True)
class ZeroGradOrder:
    """Position of zero_grad() in the loop of one optimizer."""

    ends_loop: bool | None = None
    """None before the first call."""

    def zeroes(self, *, has_computed: bool, forward_begins: bool) -> bool:
        """Return whether this zero_grad() begins a step.

        `has_computed` tells whether the current step has computed anything, and `forward_begins` whether a forward pass
        will begin the next step.
        """
        if self.ends_loop is None:
            self.ends_loop = has_computed
        return not (self.ends_loop or forward_begins)

    def steps(self) -> None:
        if self.ends_loop is None:
            self.ends_loop = True


@dataclass(slots=True)
class PassOrder:
    """Detects, from the forward passes of one module, that the script has left out the vote on the current step.

    Nothing is concluded before the first committed step. A wrong conclusion costs one attempt: in the next attempt of
    the same step the script may start over, or make twice as many forward passes. Whatever it does in a committed step
    is usual from then on.
    """

    counts: bool = True
    """True if forward passes are counted, which requires that a pass knows at its beginning whether it reduces."""
    has_reduced: bool = False
    """True once a backward pass of this module has reduced gradients in this step."""
    _ended: int = -1
    _forwards: int = 0  # reducing passes since the step began or the module last reduced
    _most: int = 0  # highest value of _forwards in this step
    _starts_over: bool = False  # in this step
    _usual_most: int = 0
    _usually_starts_over: bool = False
    _patience: int = 1
    _step: int = -1
    _gave_up_at: int | None = None

    def sync(self, *, step: int, ended: int, was_committed: bool) -> None:
        """Bring the counts up to date after `ended` attempts. `step` is the current or next step."""
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
        """Record a forward pass whose backward pass will reduce."""
        self._forwards += 1
        self._most = max(self._most, self._forwards)

    def starts_over(self) -> bool:
        """Return whether the step was left out: a forward pass follows, and the reduced gradients are gone."""
        self._starts_over = True
        is_unusual = bool(self._usual_most) and not self._usually_starts_over
        return is_unusual and self._gave_up_at != self._step

    def repeats(self) -> bool:
        """Return whether the step was left out.

        Called when a reducing forward pass follows an abandoned one, without a backward pass since the last reduction.
        """
        return self.counts and bool(self._usual_most) and self._forwards >= self._usual_most * self._patience

    def gave_up(self) -> None:
        self._patience *= 2
        self._gave_up_at = self._step
