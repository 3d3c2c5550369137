"""Batches that workers load ahead: each is the one that the sampler draws at that step, whatever has changed."""

from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset

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
        expected = 10 * source.batch(agent.current_step, *agent.at)
        assert torch.equal(next(batches), expected), number
        agent.end(commit=commit)
        if number == 3:
            agent.at = (1, 2)
        if number == 5:
            agent.at, agent.current_step = (0, 3), 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_accumulates_is_loaded_ahead_too(workers: int) -> None:
    agent = Place(0, 2)
    source = StepSampler(1000, 4, agent, accumulate=2)
    batches = iter(StepLoader(Numbers(), source, num_workers=workers))
    for step in range(3):
        loaded = [batch.tolist() for batch in islice(batches, 2)]
        assert loaded == [(10 * source.batch(2 * step + number, 0, 2)).tolist() for number in range(2)]
        agent.end()


def test_options_that_choose_samples_are_refused() -> None:
    with pytest.raises(TypeError, match="batch_size, shuffle: the StepSampler chooses the samples"):
        StepLoader(Numbers(), StepSampler(1000, 4, Place()), shuffle=True, batch_size=3)
