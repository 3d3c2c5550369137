"""Rules that detect where a training loop begins a step, and where it abandons one. This module does no I/O.

A step begins with the first forward pass of a module that uses the Agent, with the first reduction, or with the vote. A
zero_grad() at the top of the loop must also begin the step, so that a healing rank has its peer's state before the
script reads the old state. A zero_grad() at the end of the loop must not begin a step, because an evaluation, a
checkpoint or the end of training may follow.

If a forward pass will begin the step anyway, zero_grad() does not begin it, which is correct in both kinds of loop.
Otherwise the first call decides: if the loop has computed before, zero_grad() is at the end of the loop.

A script may abandon a step, for example because it catches an exception or the loss is NaN, and continue with another
forward pass. But so does a script that accumulates gradients, makes two passes per step (SAM) or computes several
outputs for one loss. `PassOrder` distinguishes these cases by what the script did in committed steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class StepPart(Protocol):
    """A module whose forward passes begin steps, and whose backward passes reduce gradients."""

    @property
    def module(self) -> Any:
        """The wrapped module."""
        ...

    @property
    def can_begin_step(self) -> bool:
        """True if the next forward pass begins a step, because the module is in training mode."""
        ...

    @property
    def pass_order(self) -> "PassOrder": ...

    @property
    def has_abandoned(self) -> bool:
        """True if the autograd graph of a forward pass in this step was freed without a backward pass."""
        ...

    @property
    def parameters_reduced(self) -> Sequence[Any]: ...

    def skip_microbatch(self) -> bool:
        """Undo what this batch changed, if its backward pass would reduce nothing. Return False for other batches."""
        ...

    def contribute_zeros(self) -> bool:
        """Reduce zeros instead of the batch's gradients. Return False if some gradients have already been reduced."""
        ...

    def abandon_backward(self) -> None:
        """Abandon a backward pass that has begun to reduce. Raise AgentError if other ranks in the group need it."""
        ...

    def share_buffers(self) -> None:
        """Start exchanging values that must be equal in all groups, such as buffers. Call this before the vote."""
        ...

    def end_step(self, *, is_committed: bool) -> None:
        """Keep the exchanged values if the step is committed. Otherwise restore the values from before the step."""
        ...


@dataclass(slots=True)
class ZeroGradOrder:
    """Detects whether the training loop calls an optimizer's zero_grad() at its top or at its end."""

    ends_loop: bool | None = None
    """True if zero_grad() is called at the end of the loop, or None before the first call."""

    def should_begin_step(self, *, has_computed: bool, can_forward_begin: bool) -> bool:
        """Return whether a call to zero_grad() begins a step.

        `has_computed` is True if the script has already computed something for the current step, and
        `can_forward_begin` if the next forward pass will begin a step.
        """
        if self.ends_loop is None:
            self.ends_loop = has_computed
        return not (self.ends_loop or can_forward_begin)

    def record_optimizer_step(self) -> None:
        if self.ends_loop is None:
            self.ends_loop = True


@dataclass(slots=True)
class PassOrder:
    """Detects, from the forward passes of one module, that the script has abandoned a step without a vote.

    Nothing is detected before the first committed step. A false detection discards only one attempt: in the retry of
    the step, the script may reset its gradients again, and may make twice as many forward passes. A pattern that occurs
    in a committed step is treated as normal from then on.
    """

    counts: bool = True
    """True if forward passes are counted. This requires that each pass knows in advance whether it will reduce."""
    has_reduced: bool = False
    """True once a backward pass of this module has reduced gradients in this step."""
    _ended: int = -1
    _forwards: int = 0  # reducing passes since the step began or the module last reduced
    _most: int = 0  # highest value of _forwards in this step
    _has_restarted: bool = False  # whether a forward pass followed a reset of reduced gradients in this step
    _usual_most: int = 0
    _usually_restarts: bool = False
    _patience: int = 1
    _step: int = -1
    _discarded_at: int | None = None

    def sync(self, *, step: int, ended: int, was_committed: bool) -> None:
        """Reset the counts if an attempt at a step has ended since the last call.

        `ended` is the number of attempts that have ended, and `was_committed` is the result of the last one.
        """
        self._step = step
        if ended == self._ended:
            return
        if was_committed:
            self._usual_most = max(self._usual_most, self._most, 1)
            self._usually_restarts |= self._has_restarted
            self._patience, self._discarded_at = 1, None
        self._ended = ended
        self._forwards, self._most, self.has_reduced, self._has_restarted = 0, 0, False, False

    def record_reduction(self) -> None:
        self.has_reduced, self._forwards = True, 0

    def record_forward(self) -> None:
        """Record a forward pass whose backward pass will reduce gradients."""
        self._forwards += 1
        self._most = max(self._most, self._forwards)

    def record_forward_after_reset(self) -> bool:
        """Record a forward pass after a reset of reduced gradients. Return whether the script abandoned the step."""
        self._has_restarted = True
        is_unusual = bool(self._usual_most) and not self._usually_restarts
        return is_unusual and self._discarded_at != self._step

    def has_abandoned_step(self) -> bool:
        """Return whether another forward pass, after one without a backward pass, means that the step was abandoned."""
        return self.counts and bool(self._usual_most) and self._forwards >= self._usual_most * self._patience

    def record_discard(self) -> None:
        self._patience *= 2
        self._discarded_at = self._step
