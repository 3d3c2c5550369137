"""The sampler: every place its own samples, every epoch every sample, and nothing but (seed, step, place, places)."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from agent_client.errors import ConfigurationError
from agent_client.training.sampler import StepSampler

lengths = st.integers(1, 60)
batch_sizes = st.integers(1, 20)
seeds = st.integers(0, 2**31)
steps = st.integers(0, 200)


class Place:
    """As much of an Agent as a sampler asks for."""

    def __init__(self, place: int = 0, places: int = 1) -> None:
        self.current_step = self.steps_ended = self.moves = 0
        self.accumulates = False
        self.at = (place, places)

    def end(self, *, commit: bool = True) -> None:
        self.current_step += commit
        self.steps_ended += 1
        self.moves += 1

    def slot(self) -> tuple[int, int]:
        return self.at

    def slots(self) -> list[tuple[int, int]]:
        place, places = self.at
        return [(place, places), (place + 1, places)]


def sampler(length: int, batch_size: int, seed: int = 0, agent: Place | None = None) -> StepSampler:
    return StepSampler(length, batch_size, agent or Place(), seed)  # type: ignore[arg-type]


def stream(length: int, batch_size: int, seed: int, places: int, count: int) -> list[int]:
    """The samples of `count` steps in the order of step and place."""
    source = sampler(length, batch_size, seed)
    batches = [source.batch(step, place, places) for step in range(count) for place in range(places)]
    return torch.cat(batches).tolist()


@st.composite
def slots(draw: st.DrawFn) -> tuple[int, int]:
    places = draw(st.integers(1, 8))
    return draw(st.integers(0, places - 1)), places


@given(lengths, batch_sizes, seeds, st.lists(st.tuples(steps, slots()), min_size=1, max_size=8))
def test_a_batch_is_a_function_of_seed_step_place_and_places(
    length: int, batch_size: int, seed: int, asked: list[tuple[int, tuple[int, int]]]
) -> None:
    """Whatever was asked before: after a restart, on another host, for a discarded step."""
    used = sampler(length, batch_size, seed)
    for step, slot in [*asked, *asked[::-1]]:
        fresh = sampler(length, batch_size, seed)
        torch.manual_seed(step)  # torch's own generator plays no part
        batch = used.batch(step, *slot)
        assert torch.equal(batch, fresh.batch(step, *slot))
        assert (batch.shape, batch.dtype) == ((batch_size,), torch.int64)
        assert 0 <= batch.min() <= batch.max() < length


@given(lengths, batch_sizes, seeds, st.integers(1, 6), st.integers(1, 20))
def test_epochs_cover_everything_exactly_once(length: int, batch_size: int, seed: int, places: int, count: int) -> None:
    """Over all places together, one permutation after the other without a gap."""
    samples = stream(length, batch_size, seed, places, count)
    for begin in range(0, len(samples), length):
        epoch = samples[begin : begin + length]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == length:
            assert set(epoch) == set(range(length))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    samples = stream(50, 10, seed=1, places=1, count=10)
    assert samples[:50] != samples[50:]
    assert sorted(samples[:50]) != samples[:50]
    assert samples != stream(50, 10, seed=2, places=1, count=10)


def test_it_follows_the_agent_s_step_and_place() -> None:
    agent = Place(1, 3)
    source = sampler(100, 4, seed=5, agent=agent)
    batches = iter(source)
    first = next(batches)
    agent.end(commit=False)
    assert torch.equal(first, next(batches)), "a discarded step yields the same samples again"
    assert torch.equal(first, source.batch(0, 1, 3))
    agent.current_step = 6
    agent.end()
    assert torch.equal(next(batches), source.batch(7, 1, 3))
    agent.end(commit=False)
    agent.at = (0, 2)
    assert torch.equal(next(batches), source.batch(7, 0, 2))


def test_a_batch_ahead_of_its_step_is_refused() -> None:
    """A DataLoader with workers draws ahead; torch asks for its indices in this process, so here it is seen."""
    batches = iter(sampler(100, 4))
    next(batches)
    with pytest.raises(ConfigurationError, match="num_workers draws ahead.* use StepLoader.*accumulate=4"):
        next(batches)
    loader = DataLoader(range(100), batch_sampler=sampler(100, 4), num_workers=2, collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="num_workers"):
        iter(loader)


def test_a_step_that_was_computed_and_skipped_has_the_same_batch_again() -> None:
    """A GradScaler skips it; a loop that is left and entered again draws again."""
    agent = Place()
    source = sampler(100, 4, agent=agent)
    batches = iter(source)
    first = next(batches)
    agent.moves += 1
    assert torch.equal(next(batches), first)
    assert torch.equal(next(iter(source)), first)


def test_a_step_that_accumulates_has_batches_of_its_own() -> None:
    agent = Place(1, 3)
    source = StepSampler(600, 4, agent, accumulate=2)
    batches = iter(source)
    drawn: list[torch.Tensor] = []
    for commit in (True, False, True):
        drawn += islice(batches, 2)
        agent.end(commit=commit)
    assert [batch.tolist() for batch in drawn] == [source.batch(step, 1, 3).tolist() for step in (0, 1, 2, 3, 2, 3)]
    assert len(torch.cat(drawn[:4]).unique()) == 16
    with pytest.raises(ConfigurationError, match="both say how many"):
        next(source.microbatches())


def test_a_loop_that_accumulates_and_does_not_say_so_is_refused() -> None:
    agent = Place()
    batches = iter(sampler(100, 4, agent=agent))
    next(batches)
    agent.moves, agent.accumulates = 1, True
    with pytest.raises(ConfigurationError, match=r"accumulates more than 1 batches.*accumulate=4"):
        next(batches)


def test_where_a_rank_has_several_microbatches_it_gets_them_all_at_once() -> None:
    agent = Place(2, 6)
    agent.current_step = 9
    source = sampler(100, 4, seed=5, agent=agent)
    [batches] = islice(source.microbatches(), 1)
    assert [batch.tolist() for batch in batches] == [source.batch(9, place, 6).tolist() for place in (2, 3)]


@pytest.mark.parametrize(("length", "batch_size"), [(0, 1), (-1, 1), (1, 0), (1, -3)])
def test_an_empty_data_set_or_batch_is_refused(length: int, batch_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"length {length}, batch_size {batch_size} and accumulate 1 must be at least 1"
    ):
        sampler(length, batch_size)
