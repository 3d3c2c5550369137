"""Selects the samples on which a rank trains.

All batches of a run are numbered from 0: first the batches of step 0 on all ranks, then those of step 1, and so on. The
number of a step's first batch is the number of batches in all earlier committed steps. A healing group copies it
together with the state. So each batch is used in exactly one committed step, even if groups join and leave.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from agent_client.errors import ConfigurationError
from agent_client.step.rules.comparison import DataChoice

if TYPE_CHECKING:
    from agent_client.step.agent import Agent
    from agent_client.training.local_sgd import OuterSteps

T = TypeVar("T")


Position: TypeAlias = "Agent | OuterSteps"
"""Position of a rank in the run. An Agent counts steps. LocalSGD and DiLoCo count inner steps."""


@dataclass(slots=True)
class Draws:
    _ended: int = -1
    _moves: int = -1
    _count: int = 0

    def draw(self, of: int, *, ended: int, moves: int, accumulates: bool) -> int:
        """Return the index, from 0, of this rank's next batch in the step. The rank has `of` batches per step.

        If the step was computed but not voted on, because a GradScaler skipped it, start again with its first batch.
        `ended` counts steps, and `moves` forward passes, reductions and votes. `accumulates` is True if the last
        forward pass belongs to a microbatch that only accumulates gradients.
        """
        if ended != self._ended:
            self._ended, self._count = ended, 0
        elif self._count >= of:
            if accumulates:
                raise ConfigurationError(
                    f"StepSampler: the loop accumulates more than {of} batches in one step, and would "
                    "train on the same samples again; say how many: StepSampler(..., accumulate=4)"
                )
            if moves == self._moves:
                raise ConfigurationError(
                    "StepSampler: another batch was asked for before the step of the last one was computed. "
                    "A DataLoader with num_workers draws ahead, and would train on the same samples again: "
                    "use StepLoader in its place. A loop that accumulates says how many batches: "
                    "StepSampler(..., accumulate=4)"
                )
            self._count = 0
        self._moves = moves
        self._count += 1
        return self._count - 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """One of a rank's batches in a step.

    `first` is the number of the step's first batch. Numbers count from 0 over all ranks and steps of the run.
    """

    first: int
    offsets: tuple[int, ...]
    """Offsets of all of the rank's batches in the step, from `first`."""
    stride: int
    """Number of batches in the step, summed over all ranks."""
    index: int = 0
    """Index of this batch in `offsets`."""

    @property
    def sample_number(self) -> int:
        return self.first + self.offsets[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.offsets) - 1

    def following(self) -> "Drawn":
        """Return the rank's next batch, assuming that no step is discarded and no group joins or leaves."""
        if self.is_last:
            return Drawn(self.first + self.stride, self.offsets, self.stride)
        return replace(self, index=self.index + 1)


def drawn_in(slots: Sequence[tuple[int, int]], rank_batches: int, accumulate: int) -> Drawn:
    """Return the first batch of a rank in the next step.

    `slots` is the rank's result of `Agent.slots`. Each slot has `accumulate` batches. `rank_batches` is the number of
    slots in all committed steps, summed over all ranks in all groups.
    """
    places = slots[0][1]
    offsets = tuple(number * places + place for place, _ in slots for number in range(accumulate))
    return Drawn(rank_batches * accumulate, offsets, places * accumulate)


def in_microbatches(drawn: Iterable[tuple[Drawn, T]], accumulate: int) -> Iterator[list[T]]:
    """Group a rank's batches into lists that have one batch for each of the rank's microbatches.

    Yield `accumulate` such lists per step.
    """
    batches: list[T] = []
    for each, batch in drawn:
        several = len(each.offsets) // accumulate
        if each.index % several == 0:
            batches = []
        batches.append(batch)
        if len(batches) == several:
            yield batches


class StepSampler:
    """Iterable over batches of sample indices. In every step, the ranks in all groups get disjoint batches.

    Each epoch has its own random order. An epoch is `length` samples, summed over all ranks. Each sample is used once
    per epoch, even if groups join and leave. After a discarded step, the same samples are returned again. The Agent
    determines the position, so a loop that resumes from a checkpoint continues with the right batch. To load samples in
    worker processes, use StepLoader.

    Example:
        ```python
        for batch in StepSampler(len(labels), 64, agent):  # int64 indices of shape (64,)
            if agent.current_step >= 1000:
                break
            optimizer.zero_grad()
            loss_fn(replicated(images[batch]), labels[batch]).backward()
            optimizer.step()
        ```
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        position: Position,
        seed: int = 0,
        *,
        accumulate: int = 1,
        steps: int | None = None,
    ) -> None:
        """Create the sampler. All arguments except `position` must be the same in all groups.

        Args:
            length: Number of samples in the data set.
            batch_size: Number of samples in a batch of one rank.
            position: The Agent, or the LocalSGD or DiLoCo object, whose inner steps are then counted.
            seed: Seed for the random order.
            accumulate: Number of batches per rank and step. The loop must run a backward pass for each batch, under
                `no_sync()` for all but the last.
            steps: Number of committed steps after which the iteration ends. If None, it never ends.

        Raises:
            ValueError: `length`, `batch_size` or `accumulate` is less than 1.
        """
        if length < 1 or batch_size < 1 or accumulate < 1:
            raise ValueError(f"length {length}, batch_size {batch_size} and accumulate {accumulate} must be at least 1")
        self.data = DataChoice(length, batch_size, accumulate, seed)
        self._position = position
        self._steps = math.inf if steps is None else steps
        self._order: tuple[int, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield this rank's batches, `accumulate` in each step.

        Returns:
            An iterator over tensors of sample indices, int64 of shape (batch_size,).

        Raises:
            ConfigurationError: Another batch is requested before the script has used the last one, or the mode is
                CONSTANT_BATCH, which requires `microbatches`.
        """
        return (self.batch(drawn.sample_number) for drawn in self.draws())

    def draws(self, *, several: bool = False) -> Iterator[Drawn]:
        """Yield a Drawn for each of this rank's batches, step by step.

        Set `several` in CONSTANT_BATCH mode, in which a rank may have several microbatches per step. Their batches are
        yielded one by one.
        """
        position, internals, draws = self._position, self._position.internals, Draws()
        while position.current_step < self._steps:
            slots = position.slots() if several else [position.slot()]  # waits for the quorum, and heals if necessary
            if position.current_step >= self._steps:
                return  # the rank has copied the state of a peer that has already done all steps
            internals.record_source(self.data)
            drawn = drawn_in(slots, position.batches_committed * internals.ranks, self.data.accumulate)
            ended, moves, accumulates = internals.draw_counts()
            index = draws.draw(len(drawn.offsets), ended=ended, moves=moves, accumulates=accumulates)
            drawn = replace(drawn, index=index)
            number = drawn.sample_number
            if several or internals.record_draw(self, number, functools.partial(self.batch, number)):
                yield drawn

    def microbatches(self) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's microbatches of each step as a list, for CONSTANT_BATCH mode.

        For each batch in the list, run a backward pass of its mean loss. Do not divide the loss by the number of
        microbatches. Run all but the last pass under the model's `no_sync()`. Then step the optimizer. With
        `accumulate` > 1, each step has that number of lists, and losses are divided only by `accumulate`.

        Returns:
            An iterator over lists of at least one tensor of sample indices, int64 of shape (batch_size,).
        """
        drawn = ((each, self.batch(each.sample_number)) for each in self.draws(several=True))
        return in_microbatches(drawn, self.data.accumulate)

    def batch(self, number: int) -> torch.Tensor:
        """Return the sample indices of batch `number`, counted from 0 over all ranks and steps of the run.

        Returns:
            Sample indices, int64 of shape (batch_size,).
        """
        length, batch_size = self.data.length, self.data.batch_size
        at = torch.arange(number * batch_size, (number + 1) * batch_size, device="cpu")
        epochs = torch.div(at, length, rounding_mode="floor")
        parts = [self._permutation(int(epoch))[at[epochs == epoch] % length] for epoch in epochs.unique()]
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> torch.Tensor:
        order = self._order  # the Agent's thread, which names the samples of a bad step, may replace it meanwhile
        if order is None or order[0] != epoch:
            generator = torch.Generator("cpu").manual_seed((self.data.seed * 1_000_003 + epoch) % 2**64)
            self._order = order = (epoch, torch.randperm(self.data.length, generator=generator, device="cpu"))
        return order[1]
