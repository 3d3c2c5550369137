"""Which call of a training loop begins a step. Pure.

A forward pass of a module that goes through the Agent does, and so do a reduction and the vote: whatever comes first.
A zero_grad() at the top of the loop does too, so that a rank that heals has its peers' state before anything reads the
old one. A zero_grad() at the end of the loop must not: an evaluation, a checkpoint or the end of training may follow.

Where a forward pass will begin the step, zero_grad() need not: that is right in loops of either order. Elsewhere the
first call tells the order: a loop whose first step had computed before its optimizer was zeroed zeroes at its end.
"""

from dataclasses import dataclass
from typing import Protocol


class StepPart(Protocol):
    """A module whose forward passes begin steps, and whose backward passes reduce in them."""

    @property
    def begins_steps(self) -> bool:
        """Whether its next forward pass begins a step: it is in training mode."""
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
