"""Samples loaded in worker processes, ahead of the step, while replica groups come and go."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from agent_client.errors import ConfigurationError
from agent_client.training.sampler import Drawn, Position, StepSampler, in_microbatches

_CHOOSE_SAMPLES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)
"""What `StepLoader.of` takes from a DataLoader."""


class StepLoader:
    """The batches of `sampler`, loaded from `dataset` by the workers of a torch DataLoader.

        loader = StepLoader(dataset, StepSampler(len(dataset), batch_size, agent), num_workers=4)
        for images, labels in loader: ...

    Workers are given the batches that come next if no step is discarded and no group comes or goes. Where one does,
    what they have loaded for nothing is dropped, and the right batch is loaded: it costs the time of at most
    `num_workers * prefetch_factor` batches.

    `options` are DataLoader's, but for those that choose samples: num_workers, collate_fn, pin_memory, prefetch_factor,
    worker_init_fn, multiprocessing_context, timeout. `loader` is the class that loads: torch's, or torchdata's
    StatefulDataLoader. The position is the Agent's, so a new loader continues where the Agent is.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: StepSampler, *, loader: type[DataLoader[Any]] = DataLoader, **options: Any
    ) -> None:
        """Raises TypeError for options that choose samples, ValueError for those that torch refuses."""
        if chosen := sorted(_CHOOSE_SAMPLES & options.keys()):
            raise TypeError(f"{', '.join(chosen)}: the StepSampler chooses the samples; leave it out")
        self.sampler = sampler
        self._ahead = _Ahead(sampler)
        self._loader = loader(dataset, batch_sampler=self._ahead, **options)

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        position: Position,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        steps: int | None = None,
        seed: int = 0,
    ) -> Self:
        """Load what a DataLoader loads, step by step: its data set, batch size and workers, and an order of its own.

        Args:
            loader: Of a data set with a length. Its sampler does not count.
            position: The Agent.
            batch_size: Samples in a batch. None: that of `loader`.
            accumulate: Batches of each step.
            steps: The batches end when so many steps are committed. None: they have no end.
            seed: Of the order; the same in all replica groups.

        Raises:
            ConfigurationError: `loader` chooses its samples in a way that cannot be kept.
        """
        size = batch_size or loader.batch_size
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "an IterableDataset has no numbered samples, so a group cannot know which samples are its own: use a "
                "data set with __getitem__ and __len__, or shard it yourself by agent.slots() and agent.current_step"
            )
        if size is None:
            raise ConfigurationError("a DataLoader with its own batch_sampler: give it a batch_size instead")
        if batch_size is None and type(loader.sampler) not in (RandomSampler, SequentialSampler):
            raise ConfigurationError(
                f"{type(loader.sampler).__name__}: samples are chosen by the step and by the groups that are present, "
                "in a random order; leave the sampler out, or make the StepLoader yourself"
            )
        options = {name: getattr(loader, name) for name in _KEPT}
        count: int = len(loader.dataset)  # type: ignore[arg-type]  # it is no IterableDataset
        sampler = StepSampler(count, size, position, seed, accumulate=accumulate, steps=steps)
        return cls(loader.dataset, sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        """As the sampler. Raises what the sampler raises, and what loading a sample has raised."""
        return (batch for _, batch in self.drawn())

    def drawn(self, *, several: bool = False) -> Iterator[tuple[Drawn, Any]]:
        """Yield each batch with its place in its step. `several`: as for StepSampler.draws."""
        ahead, loaded = self._ahead, None
        for wanted in self.sampler.draws(several=several):
            if loaded is None:
                ahead.begin(wanted)
                loaded = iter(self._loader)
            if wanted.number not in ahead.given:
                ahead.next = wanted
            while True:
                batch = next(loaded)
                if ahead.given.popleft() == wanted.number:
                    break
            yield wanted, batch

    def microbatches(self) -> Iterator[list[Any]]:
        """Those of each step; see StepSampler.microbatches."""
        return in_microbatches(self.drawn(several=True), self.sampler.data.accumulate)

    def state_dict(self) -> dict[str, Any]:
        """What a StatefulDataLoader keeps, such as the state of a stateful data set; nothing for torch's DataLoader."""
        return self._loader.state_dict() if hasattr(self._loader, "state_dict") else {}  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the batches begin. The position is not in it: it is that of the Agent."""
        if hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


class _Ahead:
    """A batch sampler: `next`, and what will follow it. `given`: the numbers of the batches that workers are loading.

    It has a state, which says nothing: a StatefulDataLoader would count its batches instead, and skip as many."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self.next = Drawn(0, (0,), 1)
        self.given: deque[int] = deque()

    def begin(self, first: Drawn) -> None:
        self.next = first
        self.given.clear()

    def __iter__(self) -> "_Ahead":
        return self

    def __next__(self) -> list[int]:
        number, self.next = self.next.number, self.next.following()
        self.given.append(number)
        return self._sampler.batch(number).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
