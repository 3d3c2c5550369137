"""The sampler: every place its own samples, every epoch every sample, whichever groups come and go."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from agent_client.errors import ConfigurationError
from agent_client.step.rules.comparison import DataChoice
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.world_size import WorldSize, WorldSizeMode
from agent_client.training.sampler import StepSampler
from tests.agent_client.assignments import assignment

DYNAMIC, FIXED, CONSTANT = WorldSizeMode

lengths = st.integers(1, 60)
batch_sizes = st.integers(1, 20)
seeds = st.integers(0, 2**31)
numbers = st.integers(0, 200)


class Place:
    """As much of an Agent as a sampler asks for."""

    def __init__(self, place: int = 0, places: int = 1) -> None:
        self.current_step = self.steps_ended = self.moves = self.batches_committed = 0
        self.accumulates = False
        self.at = (place, places)
        self.data: DataChoice | None = None

    ranks = 1
    internals = property(lambda self: self)

    def draw_counts(self) -> tuple[int, int, bool]:
        return self.steps_ended, self.moves, self.accumulates

    def record_source(self, data: DataChoice) -> None:
        self.data = data

    def record_draw(self, sampler: object, number: int, batch: object) -> bool:
        return True

    def end(self, *, commit: bool = True) -> None:
        self.current_step += commit
        self.batches_committed += commit * self.at[1]
        self.steps_ended += 1
        self.moves += 1

    def slot(self) -> tuple[int, int]:
        return self.at

    def slots(self) -> list[tuple[int, int]]:
        place, places = self.at
        return [(place, places), (place + 1, places)]


def sampler(length: int, batch_size: int, seed: int = 0, agent: Place | None = None) -> StepSampler:
    return StepSampler(length, batch_size, agent or Place(), seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [torch.Generator().initial_seed(), 2**63 - 1, 2**64 - 1, -(2**63), -1, 0])
def test_any_seed_of_torch_gives_an_order_of_its_own(seed: int) -> None:
    orders = [StepSampler(50, 50, Place(), seed + more).batch(0).tolist() for more in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1]


def test_the_order_of_a_negative_seed_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(-3 * 1_000_003)
    assert StepSampler(50, 50, Place(), -3).batch(0).equal(torch.randperm(50, generator=generator))


def test_another_thread_may_draw_from_another_epoch_meanwhile() -> None:
    """The Agent's, when it names the samples of a step that is not finite."""
    drawing: Any = sampler(10, 10)
    first, second = drawing.batch(0), drawing.batch(1)

    class Replaced(tuple[int, torch.Tensor]):
        def __getitem__(self, at: Any) -> Any:
            drawing._order = (1, second)
            return super().__getitem__(at)

    drawing._order = Replaced((0, first))
    assert drawing.batch(0).equal(first)


def test_its_indices_are_on_the_cpu_whatever_the_default_device() -> None:
    """torch cannot shuffle on a GPU with the generator of a CPU."""
    expected = next(iter(StepSampler(10, 4, Place())))  # type: ignore[arg-type]
    with torch.device("meta"):
        indices = next(iter(StepSampler(10, 4, Place())))  # type: ignore[arg-type]
    assert torch.equal(indices, expected)


@given(lengths, batch_sizes, seeds, st.lists(numbers, min_size=1, max_size=8))
def test_a_batch_is_a_function_of_its_number_and_the_seed(
    length: int, batch_size: int, seed: int, asked: list[int]
) -> None:
    """Whatever was asked before: after a restart, on another host, for a discarded step."""
    used = sampler(length, batch_size, seed)
    for number in [*asked, *asked[::-1]]:
        fresh = sampler(length, batch_size, seed)
        torch.manual_seed(number)  # torch's own generator plays no part
        batch = used.batch(number)
        assert torch.equal(batch, fresh.batch(number))
        assert (batch.shape, batch.dtype) == ((batch_size,), torch.int64)
        assert 0 <= batch.min() <= batch.max() < length


@given(lengths, batch_sizes, seeds, st.integers(1, 60))
def test_epochs_cover_everything_exactly_once(length: int, batch_size: int, seed: int, count: int) -> None:
    """One permutation after the other without a gap."""
    source = sampler(length, batch_size, seed)
    samples = torch.cat([source.batch(number) for number in range(count)]).tolist()
    for begin in range(0, len(samples), length):
        epoch = samples[begin : begin + length]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == length:
            assert set(epoch) == set(range(length))


class Rank(Place):
    """A rank of a group, by the rules that an Agent follows; a sampler's position."""

    def __init__(self, name: str, group_rank: int, ranks: int, world_size: WorldSize) -> None:
        self.name, self.group_rank, self.ranks = name, group_rank, ranks
        self.machine = StepMachine(world_size=world_size)

    def draw_counts(self) -> tuple[int, int, bool]:
        return self.machine.ended, self.machine.moves, False

    current_step = property(lambda self: self.machine.step)
    batches_committed = property(lambda self: self.machine.batches_committed)

    def slots(self) -> list[tuple[int, int]]:
        return self.machine.share.slots_of_rank(self.group_rank, self.ranks)


@pytest.mark.parametrize(
    ("mode", "size", "ranks", "accumulate"),
    [
        (DYNAMIC, 0, 1, 1),
        (DYNAMIC, 0, 2, 1),
        (DYNAMIC, 0, 1, 3),
        (FIXED, 3, 1, 2),
        (CONSTANT, 4, 1, 1),
        (CONSTANT, 5, 2, 2),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_each_sample_is_used_once_an_epoch_over_200_kills_and_joins(
    mode: WorldSizeMode, size: int, ranks: int, accumulate: int, seed: int
) -> None:
    """After each step, discarded or not, the numbers of uses of any two samples differ by at most 1."""
    drawn, world_size = random.Random(seed), WorldSize(mode, size)
    length, batch_size = drawn.choice([(997, 4), (400, 5), (61, 7)])
    names, present = [f"g{number}" for number in range(6)], {"g2"}
    held = StepMachine(world_size=world_size)
    groups: dict[str, list[tuple[Rank, Iterator[list[torch.Tensor]]]]] = {}
    uses = torch.zeros(length, dtype=torch.int64)
    events = quorum_id = 0
    while events < 200:
        if drawn.random() < 0.4:
            changed = drawn.choice(names)
            if present != {changed}:
                present ^= {changed}
                groups.pop(changed, None)
                events += 1
        quorum_id += 1
        members = sorted(present)
        newcomers = [name for name in members if name not in groups and len(members) > 1]
        is_late = drawn.random() < 0.3  # they heal, and add zeros
        contributors = [name for name in members if not (is_late and name in newcomers)] or members
        for name in members:
            if name not in groups:
                made = [Rank(name, number, ranks, world_size) for number in range(ranks)]
                samplers = [StepSampler(length, batch_size, rank, accumulate=accumulate, seed=seed) for rank in made]
                groups[name] = [(rank, each.microbatches()) for rank, each in zip(made, samplers, strict=True)]
        used: list[torch.Tensor] = []
        for place, name in enumerate(members):
            for rank, batches in groups[name]:
                rank.machine.finish_install(held.step, 0, held.batches_committed)
                rank.machine.ask()
                own = contributors.index(name) if name in contributors else None
                rank.machine.accept_assignment(
                    assignment(place, len(members), contributors=len(contributors), place=own)
                )
                microbatches = [batch for _ in range(accumulate) for batch in next(batches)]
                assert len(microbatches) == accumulate * len(rank.machine.share.microbatches)
                used += microbatches if rank.machine.share.counts else []
        commit = drawn.random() < 0.85
        for name in members:
            for rank, _ in groups[name]:
                rank.machine.record_compute()
                rank.machine.record_reduction()
                rank.machine.vote()
                rank.machine.record_decision(commit)
        if commit:
            held = groups[contributors[0]][0][0].machine
            samples, before = torch.cat(used), int(uses.sum())
            if before // length == (before + len(samples) - 1) // length:
                assert len(samples.unique()) == len(samples), "a committed step repeats a sample"
            uses += samples.bincount(minlength=length)
            assert uses.max() - uses.min() <= 1
            assert int(uses.sum()) == held.batches_committed * ranks * accumulate * batch_size


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_skipped_batch_is_not_drawn_again_and_neither_is_another_in_its_place(groups: int) -> None:
    """Whichever group skips it: a group alone would get the same bad batch for ever."""
    ranks = [Rank(f"g{place}", 0, 1, WorldSize()) for place in range(groups)]
    samplers = [iter(StepSampler(1000, 4, rank).microbatches()) for rank in ranks]
    drawn: list[torch.Tensor] = []
    for number in range(3 * (groups + 1)):
        skips = number % (groups + 1)  # the place that skips, or none
        for place, rank in enumerate(ranks):
            rank.machine.ask()
            rank.machine.accept_assignment(assignment(place, groups, contributors=groups, place=place))
            drawn += next(samplers[place])
        for place, rank in enumerate(ranks):
            rank.machine.record_compute()
            rank.machine.skips_batch = place == skips
            rank.machine.skipped_weight = int(skips < groups)
            rank.machine.record_reduction()
            rank.machine.vote()
            rank.machine.record_decision(commit=True)
    samples = torch.cat(drawn)
    assert len(samples.unique()) == len(samples)


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    first, second = sampler(50, 50, seed=1).batch(0).tolist(), sampler(50, 50, seed=1).batch(1).tolist()
    assert first != second
    assert sorted(first) != first
    assert first != sampler(50, 50, seed=2).batch(0).tolist()


def test_it_follows_the_agent_s_batches_and_place() -> None:
    agent = Place(1, 3)
    source = sampler(100, 4, seed=5, agent=agent)
    batches = iter(source)
    first = next(batches)
    agent.end(commit=False)
    assert torch.equal(first, next(batches)), "a discarded step yields the same samples again"
    assert torch.equal(first, source.batch(1))
    assert agent.data == DataChoice(100, 4, 1, 5)
    agent.end()
    assert torch.equal(next(batches), source.batch(3 + 1))
    agent.batches_committed = 20  # it heals
    agent.end()
    assert torch.equal(next(batches), source.batch(23 + 1))
    agent.end(commit=False)
    agent.at = (0, 2)
    assert torch.equal(next(batches), source.batch(23))


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
    assert [batch.tolist() for batch in drawn] == [source.batch(number).tolist() for number in (1, 4, 7, 10, 7, 10)]
    assert len(torch.cat(drawn[:4]).unique()) == 16


def test_a_loop_that_accumulates_and_does_not_say_so_is_refused() -> None:
    agent = Place()
    batches = iter(sampler(100, 4, agent=agent))
    next(batches)
    agent.moves, agent.accumulates = 1, True
    with pytest.raises(ConfigurationError, match=r"accumulates more than 1 batches.*accumulate=4"):
        next(batches)


@pytest.mark.parametrize(("accumulate", "numbers"), [(1, [56, 57]), (2, [110, 116, 111, 117])])
def test_where_a_rank_has_several_microbatches_it_gets_them_all_at_once(accumulate: int, numbers: list[int]) -> None:
    agent = Place(2, 6)
    agent.batches_committed = 54
    source = StepSampler(1000, 4, agent, accumulate=accumulate)
    batches = [batch for each in islice(source.microbatches(), accumulate) for batch in each]
    assert [batch.tolist() for batch in batches] == [source.batch(number).tolist() for number in numbers]


@pytest.mark.parametrize(("length", "batch_size"), [(0, 1), (-1, 1), (1, 0), (1, -3)])
def test_an_empty_data_set_or_batch_is_refused(length: int, batch_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"length {length}, batch_size {batch_size} and accumulate 1 must be at least 1"
    ):
        sampler(length, batch_size)
