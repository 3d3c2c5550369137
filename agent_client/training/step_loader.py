"""Samples loaded in worker processes, ahead of the step, while replica groups come and go."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from agent_client.training.sampler import StepSampler


class StepLoader:
    """The batches of `sampler`, loaded from `dataset` by the workers of a torch DataLoader.

        loader = StepLoader(dataset, StepSampler(len(dataset), batch_size, agent), num_workers=4)
        for images, labels in loader: ...

    Workers are given the batches that come next if no step is discarded and no group comes or goes. Where one does,
    what they have loaded for nothing is dropped, and the right batch is loaded: it costs the time of at most
    `num_workers * prefetch_factor` batches.

    `options` are DataLoader's, but for those that choose samples: num_workers, collate_fn, pin_memory, prefetch_factor,
    worker_init_fn, multiprocessing_context, timeout.
    """

    def __init__(self, dataset: Dataset[Any], sampler: StepSampler, **options: Any) -> None:
        """Raises TypeError for options that choose samples, ValueError for those that torch refuses."""
        if chosen := sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()):
            raise TypeError(f"{', '.join(chosen)}: the StepSampler chooses the samples; leave it out")
        self._sampler = sampler
        self._ahead = _Ahead(sampler)
        self._loader = DataLoader(dataset, batch_sampler=self._ahead, **options)

    def __iter__(self) -> Iterator[Any]:
        """Without end, as the sampler. Raises what the sampler raises, and what loading a sample has raised."""
        ahead, loaded = self._ahead, None
        for wanted in self._sampler.places():
            if loaded is None:
                ahead.begin(wanted)
                loaded = iter(self._loader)
            if wanted not in ahead.given:
                ahead.next = wanted
            while True:
                batch = next(loaded)
                if ahead.given.popleft() == wanted:
                    break
            yield batch


class _Ahead:
    """A batch sampler: `next`, and what will follow it. `given`: what was given to the workers and is not back."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self.next = (0, 0, 1)
        self.given: deque[tuple[int, int, int]] = deque()

    def begin(self, first: tuple[int, int, int]) -> None:
        self.next = first
        self.given.clear()

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            step, place, places = at = self.next
            self.next = (step + 1, place, places)
            self.given.append(at)
            yield self._sampler.batch(*at).tolist()
