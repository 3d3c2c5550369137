"""Data loader whose worker processes load samples in advance, although replica groups may join and leave.

The workers load the batches that come next if the set of groups stays the same. If the set changes, the loader drops
these batches and loads the right ones.
"""

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
"""Options that `StepLoader.of` copies from a DataLoader."""


class StepLoader:
    """Data loader for replica groups. It loads the batches of a StepSampler in the workers of a torch DataLoader.

    The workers load in advance the batches that come next if no step is discarded and no group joins or leaves.
    Otherwise, the loader drops these batches and loads the right batch, which costs at most the time for loading
    `num_workers * prefetch_factor` batches. The Agent determines the position, so a new loader continues at the current
    step.

    Example:
        ```python
        sampler = StepSampler(len(dataset), 64, agent, steps=1000)
        for images, labels in StepLoader(dataset, sampler, num_workers=4):
            ...
        ```
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: StepSampler, *, loader: type[DataLoader[Any]] = DataLoader, **options: Any
    ) -> None:
        """Create the loader.

        Args:
            dataset: A map-style data set (with `__getitem__`).
            sampler: Sampler that selects the samples of each step.
            loader: Class of the underlying loader: torch's DataLoader, or torchdata's StatefulDataLoader.
            **options: Options of that class, such as `num_workers`, `collate_fn`, `pin_memory`, `prefetch_factor`,
                `worker_init_fn`, `multiprocessing_context` and `timeout`, but none that select samples.

        Raises:
            TypeError: An option selects samples, or changes their order.
            ValueError: torch refuses an option.
        """
        if chosen := sorted(_CHOOSE_SAMPLES & options.keys()):
            raise TypeError(f"{', '.join(chosen)}: the StepSampler chooses the samples; leave it out")
        if not options.get("in_order", True):
            raise TypeError("in_order=False would return the batch of another step; leave it out")
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
        """Create a StepLoader with the data set, batch size and workers of a DataLoader.

        The samples come in the order of a StepSampler.

        Args:
            loader: A DataLoader over a map-style data set. Its sampler is ignored.
            position: The Agent, or the LocalSGD or DiLoCo object.
            batch_size: Number of samples in a batch, or None for the batch size of `loader`.
            accumulate: Number of batches per rank and step.
            steps: Number of committed steps after which the iteration ends. If None, it never ends.
            seed: Seed for the random order. It must be the same in all replica groups.

        Returns:
            The loader.

        Raises:
            ConfigurationError: `loader` selects its samples in a way that a StepSampler cannot reproduce.
        """
        size = batch_size or loader.batch_size
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigurationError(
                "an IterableDataset has no numbered samples, so a group cannot know which samples are its own: use a "
                "data set with __getitem__ and __len__, or shard it yourself by agent.slots() and agent.current_step"
            )
        if size is None:
            raise ConfigurationError("the DataLoader has its own batch_sampler: create it with a batch_size instead")
        if batch_size is None and type(loader.sampler) not in (RandomSampler, SequentialSampler):
            raise ConfigurationError(
                f"{type(loader.sampler).__name__}: a StepLoader chooses the samples itself, in a random order; leave "
                "the sampler out, or create the StepLoader yourself"
            )
        options = {name: getattr(loader, name) for name in _KEPT}
        count: int = len(loader.dataset)  # type: ignore[arg-type]  # it is not an IterableDataset
        sampler = StepSampler(count, size, position, seed, accumulate=accumulate, steps=steps)
        return cls(loader.dataset, sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loaded batches. Raise any error from the sampler or a worker."""
        return (batch for _, batch in self.drawn())

    def drawn(self, *, several: bool = False) -> Iterator[tuple[Drawn, Any]]:
        """Yield each loaded batch with its Drawn. Set `several` in CONSTANT_BATCH mode (see `StepSampler.draws`)."""
        ahead, loaded = self._ahead, None
        for wanted in self.sampler.draws(several=several):
            if loaded is None:
                ahead.restart(wanted)
                loaded = iter(self._loader)
            if wanted.sample_number not in ahead.given:
                ahead.next = wanted
            while True:
                batch = next(loaded)
                if ahead.given.popleft() == wanted.sample_number:
                    break
            yield wanted, batch

    def microbatches(self) -> Iterator[list[Any]]:
        """Yield the loaded microbatches of each step as a list (see `StepSampler.microbatches`)."""
        return in_microbatches(self.drawn(several=True), self.sampler.data.accumulate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a StatefulDataLoader, or an empty dict for torch's DataLoader."""
        return self._loader.state_dict() if hasattr(self._loader, "state_dict") else {}  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a StatefulDataLoader before the first batch. This does not change which batch is next."""
        if hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state_dict)  # type: ignore[attr-defined]


class _Ahead:
    """Batch sampler that yields the batch `next` and the batches that are expected after it.

    Its state is intentionally an empty dict. If it had no state_dict(), a StatefulDataLoader would count batches and,
    after loading its own state, skip that number.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self.next = Drawn(0, (0,), 1)
        self.given: deque[int] = deque()
        """Numbers of the batches that workers are loading."""

    def restart(self, first: Drawn) -> None:
        self.next = first
        self.given.clear()

    def __iter__(self) -> "_Ahead":
        return self

    def __next__(self) -> list[int]:
        number, self.next = self.next.sample_number, self.next.following()
        self.given.append(number)
        return self._sampler.batch(number).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
