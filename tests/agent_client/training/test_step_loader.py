"""Batches that workers load ahead: each is the one that the sampler draws at that step, whatever has changed."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from agent_client.errors import ConfigurationError
from agent_client.training.sampler import StepSampler
from agent_client.training.step_loader import StepLoader
from tests.agent_client.training.test_sampler import Place


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return 10 * index


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_that_of_its_step(workers: int) -> None:
    """Steps are discarded, groups go and come back, this rank heals."""
    agent = Place(1, 3)
    source = StepSampler(1000, 4, agent)
    batches = iter(StepLoader(Numbers(), source, num_workers=workers))
    for number, commit in enumerate([True, True, False, True, True, True, True, True]):
        expected = 10 * source.batch(agent.batches_committed + agent.at[0])
        assert torch.equal(next(batches), expected), number
        agent.end(commit=commit)
        if number == 3:
            agent.at = (1, 2)
        if number == 5:
            agent.at, agent.batches_committed = (0, 3), 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_accumulates_is_loaded_ahead_too(workers: int) -> None:
    agent = Place(0, 2)
    source = StepSampler(1000, 4, agent, accumulate=2)
    batches = iter(StepLoader(Numbers(), source, num_workers=workers))
    for step in range(3):
        loaded = [batch.tolist() for batch in islice(batches, 2)]
        assert loaded == [(10 * source.batch(4 * step + 2 * number)).tolist() for number in range(2)]
        agent.end()


def test_options_that_choose_samples_are_refused() -> None:
    with pytest.raises(TypeError, match="batch_size, shuffle: the StepSampler chooses the samples"):
        StepLoader(Numbers(), StepSampler(1000, 4, Place()), shuffle=True, batch_size=3)
    with pytest.raises(TypeError, match="in_order=False would return the batch of another step"):
        StepLoader(Numbers(), StepSampler(1000, 4, Place()), num_workers=2, in_order=False)
    assert StepLoader(Numbers(), StepSampler(1000, 4, Place()), num_workers=2, in_order=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_ends_with_its_last_step_also_where_a_peer_has_done_that(workers: int) -> None:
    """A discarded step has its batch again; a group that heals to the end has none."""
    agent = Place(0, 2)
    source = StepSampler(1000, 4, agent, steps=3)
    seen = []
    for batch in StepLoader(Numbers(), source, num_workers=workers):
        seen.append(batch.tolist())
        agent.end(commit=len(seen) != 2)
    assert seen == [(10 * source.batch(2 * step)).tolist() for step in (0, 1, 1, 2)]
    agent.current_step = 0
    agent.slot = lambda: setattr(agent, "current_step", 3) or (0, 2)  # type: ignore[method-assign]
    assert list(StepLoader(Numbers(), source, num_workers=workers)) == []


def test_what_a_dataloader_loads_is_loaded_by_the_step() -> None:
    """Its batch size, workers and collation; two groups have different samples, whatever its sampler chose."""
    plain = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, collate_fn=sorted)
    loaders = [StepLoader.of(plain, Place(place, 2), accumulate=2, steps=5, seed=3) for place in (0, 1)]
    of_a, of_b = (next(iter(loader)) for loader in loaders)
    assert of_a == sorted((10 * StepSampler(1000, 4, Place(), 3, accumulate=2).batch(0)).tolist())
    assert not set(of_a) & set(of_b)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dataset": Stream(), "batch_size": 2}, "an IterableDataset has no numbered samples.*agent.slots"),
        ({"batch_sampler": BatchSampler(RandomSampler(range(9)), 2, False)}, "create it with a batch_size instead"),
        (
            {"sampler": WeightedRandomSampler([1.0], 9), "batch_size": 2},
            "WeightedRandomSampler: .*leave the sampler out",
        ),
    ],
)
def test_a_dataloader_that_chooses_otherwise_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        StepLoader.of(DataLoader(**({"dataset": Numbers()} | options)), Place())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_goes_on_at_the_step(workers: int) -> None:
    """Where its own count of batches would have it skip as many again."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    agent = Place(0, 2)

    def make() -> StepLoader:
        source = StepSampler(1000, 4, agent)
        return StepLoader(Numbers(), source, loader=torchdata.StatefulDataLoader, num_workers=workers)

    first = make()
    for _ in islice(first, 3):
        agent.end()
    kept = first.state_dict()
    again = make()
    again.load_state_dict(kept)
    for step, batch in enumerate(islice(again, 3), start=3):
        assert batch.tolist() == (10 * StepSampler(1000, 4, agent).batch(2 * step)).tolist()
        agent.end()
