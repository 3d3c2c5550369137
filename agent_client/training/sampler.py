"""Choice of the samples on which a rank trains.

All batches of a run are numbered: first those of step 0, then those of step 1, and so on. A step has one batch for each
contribution of a rank, so its first number is the count of batches in the committed steps before it. That count heals
with the step, and each number is drawn in exactly one committed step, whichever groups come and go.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from agent_client.errors import ConfigurationError
from agent_client.step.rules.comparison import DataChoice

T = TypeVar("T")


class Position(Protocol):
    """Position of a rank: an Agent, or a LocalSGD or DiLoCo, whose inner steps count.

    Read `current_step` and `batches_committed` after the slots, which wait until this rank has joined its peers.
    """

    @property
    def internals(self) -> "DrawRecords": ...

    @property
    def current_step(self) -> int: ...

    @property
    def batches_committed(self) -> int: ...

    def slots(self) -> Sequence[tuple[int, int]]: ...

    def slot(self) -> tuple[int, int]: ...


class DrawRecords(Protocol):
    @property
    def ranks(self) -> int:
        """Number of ranks that each count in `batches_committed` as one."""
        ...

    def draw_counts(self) -> tuple[int, int, bool]:
        """Return the steps that were committed or discarded, a counter, and whether the pass accumulates.

        The counter counts forward passes, reductions and votes. A pass accumulates under `no_sync()`, when another pass
        of the same step follows.
        """
        ...

    def record_source(self, data: DataChoice) -> None: ...

    def record_draw(self, number: int, batch: Callable[[], torch.Tensor]) -> bool:
        """Record the next batch. Return False if its step had been left out and is discarded now."""
        ...


@dataclass(slots=True)
class Draws:
    _ended: int = -1
    _moves: int = -1
    _count: int = 0

    def draw(self, of: int, *, ended: int, moves: int, accumulates: bool) -> int:
        """Return which of the step's `of` batches is next, counted from 0.

        A step that was computed without a vote, because a GradScaler skipped it, begins again.
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
    """Number of one batch of a rank, and its place among the rank's batches of the step."""

    first: int
    offsets: tuple[int, ...]
    """Offsets of the rank's batches from `first`."""
    stride: int
    """Number of batches in the step, over all ranks."""
    index: int = 0

    @property
    def number(self) -> int:
        return self.first + self.offsets[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.offsets) - 1

    def following(self) -> "Drawn":
        """Return the rank's next batch, if no step is discarded and no group comes or goes."""
        if self.is_last:
            return Drawn(self.first + self.stride, self.offsets, self.stride)
        return replace(self, index=self.index + 1)


def drawn_in(slots: Sequence[tuple[int, int]], rank_batches: int, accumulate: int) -> Drawn:
    """Return the first batch of a rank in the next step.

    `rank_batches` is the number of batches in the committed steps, over the ranks of all groups. `accumulate` is the
    number of batches per slot.
    """
    places = slots[0][1]
    offsets = tuple(number * places + place for place, _ in slots for number in range(accumulate))
    return Drawn(rank_batches * accumulate, offsets, places * accumulate)


def in_microbatches(drawn: Iterable[tuple[Drawn, T]], accumulate: int) -> Iterator[list[T]]:
    """Collect the batches that are back-propagated in a row: one batch of each microbatch of the rank."""
    batches: list[T] = []
    for each, batch in drawn:
        several = len(each.offsets) // accumulate
        if each.index % several == 0:
            batches = []
        batches.append(batch)
        if len(batches) == several:
            yield batches


class StepSampler:
    """Iterable over batches of sample indices; in every step the ranks of all groups get disjoint batches.

    The order is one random permutation per epoch. An epoch is `length` samples over all ranks, and each sample is used
    once per epoch even if groups come and go. A discarded step yields the same samples again. The position is the
    Agent's step, so a loop that resumes from a checkpoint continues at the right batch. To load samples in worker
    processes, use StepLoader.

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
        """Set the data set, the batch and the order.

        Args:
            length: Number of samples in the data set. The same in all groups, as are the arguments below.
            batch_size: Samples in a batch of one rank.
            position: The Agent. With LocalSGD or DiLoCo, that object: its inner steps count.
            seed: Seed of the order.
            accumulate: Number of batches in each step. The loop runs a backward pass for each, all but the last under
                `no_sync()`.
            steps: Number of committed steps after which the batches end, or None for no end.

        Raises:
            ValueError: `length`, `batch_size` or `accumulate` is below 1.
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
            An iterator over tensors of indices, int64 of shape (batch_size,).

        Raises:
            ConfigurationError: In CONSTANT_BATCH mode, in which a rank may have several microbatches. Also if a batch
                is requested before the step of the last one was computed.
        """
        return (self.batch(drawn.number) for drawn in self.draws())

    def draws(self, *, several: bool = False) -> Iterator[Drawn]:
        """Yield the positions of this rank's batches, step by step.

        Args:
            several: Whether a rank may have several microbatches in a step. They follow one another.
        """
        position, internals, draws = self._position, self._position.internals, Draws()
        while position.current_step < self._steps:
            slots = position.slots() if several else [position.slot()]
            if position.current_step >= self._steps:
                return  # the state of a peer that has finished was installed
            internals.record_source(self.data)
            drawn = drawn_in(slots, position.batches_committed * internals.ranks, self.data.accumulate)
            ended, moves, accumulates = internals.draw_counts()
            index = draws.draw(len(drawn.offsets), ended=ended, moves=moves, accumulates=accumulates)
            drawn = replace(drawn, index=index)
            if several or internals.record_draw(drawn.number, functools.partial(self.batch, drawn.number)):
                yield drawn

    def microbatches(self) -> Iterator[list[torch.Tensor]]:
        """Yield the microbatches of each step as a list of at least one batch, for CONSTANT_BATCH mode.

        Run a backward pass of the undivided mean loss of each microbatch, all but the last under the model's
        `no_sync()`, then step the optimizer. With `accumulate`, a step has that number of lists, and losses are divided
        by `accumulate` only.

        Returns:
            An iterator over lists of index tensors, int64 of shape (batch_size,).
        """
        drawn = ((each, self.batch(each.number)) for each in self.draws(several=True))
        return in_microbatches(drawn, self.data.accumulate)

    def batch(self, number: int) -> torch.Tensor:
        """Return the sample indices of one batch.

        Args:
            number: Number of the batch, counted over all ranks and steps of the run.

        Returns:
            Indices, int64 of shape (batch_size,).
        """
        length, batch_size = self.data.length, self.data.batch_size
        at = torch.arange(number * batch_size, (number + 1) * batch_size)
        epochs = torch.div(at, length, rounding_mode="floor")
        parts = [self._permutation(int(epoch))[at[epochs == epoch] % length] for epoch in epochs.unique()]
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.data.seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(self.data.length, generator=generator))
        return self._order[1]
