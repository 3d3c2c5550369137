"""Which samples a rank trains on. The position is the step itself, so it heals with the step."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Position(Protocol):
    """Where a rank is: an Agent, or where steps are local, a LocalSGD or DiLoCo, whose inner steps count.

    `current_step` is read after the slots: they may wait until this rank has joined its peers.
    """

    @property
    def current_step(self) -> int: ...

    def slots(self) -> Sequence[tuple[int, int]]:
        """(place, places) of each microbatch that this rank does in the step that begins."""
        ...

    def slot(self) -> tuple[int, int]:
        """The same where it is always one; raises where it may be several."""
        ...


class StepSampler:
    """Batches of indices below `length`, without end; at every step the ranks of the quorum take disjoint ones.

    The order is one permutation per epoch, drawn from `seed`; an epoch is `length` samples over all ranks. The batch is
    a function of (seed, step, place, places) alone: a discarded step yields the same samples again.
    """

    def __init__(self, length: int, batch_size: int, position: Position, seed: int = 0) -> None:
        """Raises ValueError for an empty data set or batch."""
        if length < 1 or batch_size < 1:
            raise ValueError(f"length {length} and batch_size {batch_size} must be at least 1")
        self._length = length
        self._batch_size = batch_size
        self._position = position
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """One batch a step. Raises ConfigurationError in CONSTANT_BATCH mode, where a rank may have several."""
        while True:
            place, places = self._position.slot()
            yield self.batch(self._position.current_step, place, places)

    def microbatches(self) -> Iterator[list[torch.Tensor]]:
        """Those of each step, at least one: back-propagate the mean loss of each, all but the last under `no_sync()`
        of DistributedDataParallel, and then step."""
        while True:
            slots = self._position.slots()
            yield [self.batch(self._position.current_step, place, places) for place, places in slots]

    def batch(self, step: int, place: int, places: int) -> torch.Tensor:
        """The indices, int64 of shape (batch_size,), of one rank at one step."""
        first = (step * places + place) * self._batch_size
        at = torch.arange(first, first + self._batch_size)
        epochs = torch.div(at, self._length, rounding_mode="floor")
        parts = [self._permutation(int(epoch))[at[epochs == epoch] % self._length] for epoch in epochs.unique()]
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(self._length, generator=generator))
        return self._order[1]
