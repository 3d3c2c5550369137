"""Which samples a rank trains on. The position is the step itself, so it heals with the step."""

from collections.abc import Iterator

import torch

from agent_client.agent import Agent


class StepSampler:
    """Batches of indices below `length`, without end; at every step the ranks of the quorum take disjoint ones.

    The order is one permutation per epoch, drawn from `seed`; an epoch is `length` samples over all ranks. The batch is
    a function of (seed, step, place, places) alone: a discarded step yields the same samples again.
    """

    def __init__(self, length: int, batch_size: int, agent: Agent, seed: int = 0) -> None:
        """Raises ValueError for an empty data set or batch."""
        if length < 1 or batch_size < 1:
            raise ValueError(f"length {length} and batch_size {batch_size} must be at least 1")
        self._length = length
        self._batch_size = batch_size
        self._agent = agent
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            place, places = self._agent.slot()
            yield self.batch(self._agent.current_step, place, places)

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
