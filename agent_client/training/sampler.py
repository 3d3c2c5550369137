"""Which samples a rank trains on. The position is the step itself, so it heals with the step."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from agent_client.errors import ConfigurationError


class Position(Protocol):
    """Where a rank is: an Agent, or where steps are local, a LocalSGD or DiLoCo, whose inner steps count.

    `current_step` is read after the slots: they may wait until this rank has joined its peers.
    """

    @property
    def current_step(self) -> int: ...

    @property
    def steps_ended(self) -> int:
        """Steps that were committed or discarded."""
        ...

    @property
    def moves(self) -> int:
        """Grows with every forward pass, reduction and vote."""
        ...

    @property
    def accumulates(self) -> bool:
        """Whether the last forward pass was under `no_sync()`: another one of the same step follows."""
        ...

    def slots(self) -> Sequence[tuple[int, int]]:
        """(place, places) of each microbatch that this rank does in the step that begins."""
        ...

    def slot(self) -> tuple[int, int]:
        """The same where it is always one; raises where it may be several."""
        ...


@dataclass(slots=True)
class Draws:
    """Which of a step's `accumulate` batches is drawn next. Pure."""

    accumulate: int
    _ended: int = -1
    _moves: int = -1
    _count: int = 0

    def draw(self, *, ended: int, moves: int, accumulates: bool) -> int:
        """Counted from 0. A step that was computed and not voted on (a GradScaler skips it) begins anew.

        Raises ConfigurationError where a batch is asked for ahead of its step, or where more are accumulated.
        """
        if ended != self._ended:
            self._ended, self._count = ended, 0
        elif self._count == self.accumulate:
            if accumulates:
                raise ConfigurationError(
                    f"StepSampler: the loop accumulates more than {self.accumulate} batches in one step, and would "
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


class StepSampler:
    """Batches of indices below `length`; at every step the ranks of the quorum take disjoint ones.

    The order is one permutation per epoch, drawn from `seed`; an epoch is `length` samples over all ranks. The batch is
    a function of (seed, step, place, places) alone: a discarded step yields the same samples again.

    `accumulate`: batches of `batch_size` in each step; the loop back-propagates each, all but the last under
    `no_sync()`. `steps`: the batches end when so many steps are committed, whichever group committed them; None: they
    have no end. To load in worker processes, see StepLoader.
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
        """Raises ValueError for an empty data set or batch, or nothing to accumulate."""
        if length < 1 or batch_size < 1 or accumulate < 1:
            raise ValueError(f"length {length}, batch_size {batch_size} and accumulate {accumulate} must be at least 1")
        self._length = length
        self._batch_size = batch_size
        self._position = position
        self._seed = seed
        self._accumulate = accumulate
        self._steps = math.inf if steps is None else steps
        self._order: tuple[int, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        """`accumulate` batches a step. Raises ConfigurationError in CONSTANT_BATCH mode, where a rank may have several,
        and where a batch is asked for ahead of its step."""
        return (self.batch(*at) for at in self.places())

    def places(self) -> Iterator[tuple[int, int, int]]:
        """What `batch` takes, for each batch. The next one's, if no step is discarded and no group comes or goes, has a
        step that is higher by one."""
        position, draws = self._position, Draws(self._accumulate)
        drew = getattr(position, "drew", None)  # an Agent names them where a batch is of no use
        while position.current_step < self._steps:
            place, places = position.slot()
            if position.current_step >= self._steps:
                return  # a peer's state was taken over, which has them all
            number = draws.draw(ended=position.steps_ended, moves=position.moves, accumulates=position.accumulates)
            at = position.current_step * self._accumulate + number, place, places
            if drew is None or drew(at, functools.partial(self.batch, *at)):
                yield at

    def microbatches(self) -> Iterator[list[torch.Tensor]]:
        """Those of each step, at least one: back-propagate the mean loss of each, all but the last under `no_sync()`
        of DistributedDataParallel, and then step. Raises ConfigurationError with `accumulate`, which says how many."""
        if self._accumulate > 1:
            raise ConfigurationError("StepSampler: accumulate and microbatches() both say how many; use one of them")
        position, draws = self._position, Draws(1)
        while position.current_step < self._steps:
            slots = position.slots()
            if position.current_step >= self._steps:
                return
            draws.draw(ended=position.steps_ended, moves=position.moves, accumulates=position.accumulates)
            yield [self.batch(position.current_step, place, places) for place, places in slots]

    def batch(self, step: int, place: int, places: int) -> torch.Tensor:
        """The indices, int64 of shape (batch_size,), of one rank at one step; with `accumulate`, batch n of the step
        counts as step `step * accumulate + n`."""
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
