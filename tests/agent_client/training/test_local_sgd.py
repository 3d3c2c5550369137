"""LocalSGD: inner steps talk to nobody, an outer step makes the mean everybody's or leaves what all had before."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_client.state.snapshot import snapshot
from agent_client.state.train_state import TrainState
from agent_client.step.rules.world_size import WorldSize, WorldSizeMode
from agent_client.training.local_sgd import DiLoCo, LocalSGD
from agent_client.training.sampler import StepSampler
from tests.agent_client.lone_agent import LoneAgent, inner_step, model_of, values

H = 3


def local_sgd(agent: LoneAgent, seed: int = 0, **options: Any) -> tuple[torch.nn.Module, LocalSGD]:
    model = model_of(seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"sync_every": H} | options
    return model, LocalSGD(model, inner, agent, **options)  # type: ignore[arg-type]


def diloco(model: torch.nn.Module, inner: torch.optim.Optimizer, **options: Any) -> DiLoCo:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(model, inner, outer, **options)


def parameters(model: torch.nn.Module) -> list[list[float]]:
    return values(list(model.parameters()))


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def test_whoever_holds_nothing_begins_with_an_outer_step_until_one_commits() -> None:
    agent = LoneAgent(False, False, True, mean=plus_one)
    model, optimizer = local_sgd(agent)
    before = parameters(model)
    optimizer.zero_grad()
    assert agent.asked == ["late", *["quorum", "vote"] * 3]
    assert parameters(model) == [[value + 1 for value in tensor] for tensor in before]
    optimizer.zero_grad()
    assert agent.current_step == 1


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 4), st.integers(1, 3))
def test_inner_steps_talk_to_nobody_and_an_outer_step_makes_the_mean_everybody_s(
    decisions: list[bool], interval: int, attempts: int
) -> None:
    """One that is tried again loses nothing; a lost one leaves the parameters of the last commit."""
    agent = LoneAgent(*decisions, step=1, mean=plus_one)
    model, optimizer = local_sgd(agent, sync_every=interval, attempts=attempts)
    plain = model_of()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    committed, left = parameters(plain), [*decisions, *[True] * 9]
    for number in range(3 * interval):
        agent.asked.clear()
        is_kept = inner_step(model, optimizer, number)
        inner_step(plain, reference, number)
        tried: list[bool] = []
        while (number + 1) % interval == 0 and len(tried) < attempts and True not in tried:
            tried.append(left.pop(0))
        if tried:
            averaged = [[value + 1 for value in tensor] for tensor in parameters(plain)]
            committed = averaged if tried[-1] else committed
            for parameter, values_now in zip(plain.parameters(), committed, strict=True):
                parameter.data = torch.tensor(values_now, dtype=parameter.dtype).view_as(parameter)
        assert (agent.asked, is_kept) == (["quorum", "vote"] * len(tried), False not in tried[-1:])
        assert parameters(model) == parameters(plain)


@pytest.mark.parametrize("is_diloco", [False, True])
def test_of_a_frozen_model_only_the_adapter_is_averaged_if_the_script_asks_for_it(*, is_diloco: bool) -> None:
    """A frozen parameter is averaged otherwise: the script may change it itself, as that of a momentum encoder."""
    for is_list, averaged in ((False, 4), (True, 2)):
        agent, model = LoneAgent(step=1), model_of()
        model[0].requires_grad_(False)
        adapter: Any = torch.nn.ParameterList(model[2].parameters()) if is_list else model
        inner: Any = torch.optim.SGD(model[2].parameters(), lr=0.1)
        make: Any = diloco if is_diloco else LocalSGD
        optimizer = make(adapter, inner, agent=agent, sync_every=1)
        frozen = parameters(model[0])
        assert inner_step(model, optimizer, 0)
        assert (len(agent.reduced), parameters(model[0])) == (averaged, frozen)


@given(st.lists(st.booleans(), max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_the_sampler_s_position_counts_the_inner_steps_of_committed_outer_steps(
    decisions: list[bool], interval: int, more: int
) -> None:
    """A lost outer step's samples come again; a fresh sampler at the same place goes on with the same."""
    agent = LoneAgent(*decisions, step=1)
    agent.place = (1, 2)
    model, optimizer = local_sgd(agent, sync_every=interval, attempts=1)
    sampler, fresh = (StepSampler(50, 2, optimizer, seed=4) for _ in range(2))
    batches = iter(sampler)
    for number in range(interval * len(decisions) + more):
        expected = (agent.current_step - 1) * interval + number % interval
        assert optimizer.current_step == expected
        batch = next(batches)
        assert torch.equal(batch, sampler.batch(2 * expected + 1))
        assert torch.equal(next(iter(fresh)), batch)
        inner_step(model, optimizer, number)


def test_a_sampler_ends_after_so_many_inner_steps() -> None:
    """The outer step in which the ranks join has none, so it does not count."""
    model, optimizer = local_sgd(LoneAgent())
    assert optimizer.current_step == 0
    for number, _ in enumerate(StepSampler(50, 2, optimizer, steps=2 * H + 1)):
        assert optimizer.current_step == number
        inner_step(model, optimizer, number)
    assert optimizer.current_step == number + 1 == 2 * H + 1


def test_the_sampler_waits_until_its_rank_has_joined() -> None:
    """Its first batch is the first of all: the outer step in which all join has no inner ones."""
    agent = LoneAgent()
    _, optimizer = local_sgd(agent)
    sampler = StepSampler(50, 2, optimizer)
    [first] = islice(sampler, 1)
    [[again]] = islice(sampler.microbatches(), 1)
    assert agent.current_step == 1
    assert torch.equal(first, sampler.batch(0))
    assert torch.equal(first, again)


def test_a_checkpoint_goes_on_in_the_middle_of_the_inner_steps() -> None:
    """As if nothing had been: the lost outer step that follows goes back to the same parameters, too."""

    def run(seed: int) -> tuple[TrainState, torch.nn.Module, LocalSGD]:
        model, agent = model_of(seed), LoneAgent(True, False, True, step=1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        agent.state = state = TrainState(model, inner)
        return state, model, LocalSGD(model, inner, agent, sync_every=H, attempts=1)  # type: ignore[arg-type]

    state, model, optimizer = run(seed=1)
    for number in range(H - 1):
        inner_step(model, optimizer, number)
    resumed_state, resumed_model, resumed = run(seed=2)
    resumed_state.load_state_dict(snapshot(state.state_dict()))
    for number in range(3 * H):
        assert resumed.current_step == optimizer.current_step
        assert inner_step(model, optimizer, H + number) == inner_step(resumed_model, resumed, H + number)
        assert parameters(resumed_model) == parameters(model)


class Resumed:
    """A rank whose state is that of another rank, as it was when an outer step of `kind` began."""

    def __init__(self, kind: Callable[..., LocalSGD | DiLoCo], **options: int) -> None:
        self.interval = options["sync_every"]
        self.model, self.optimizer, self.agent = self.build(1, kind, options)
        copies: list[Any] = []
        begin = self.agent.start_quorum
        self.agent.start_quorum = lambda: (copies.append(snapshot(self.agent.state.state_dict())), begin())[1]  # type: ignore[method-assign]
        self.train(self.model, self.optimizer, range(self.interval))
        [self.copy] = copies
        self.resumed_model, self.resumed, self.resumed_agent = self.build(2, kind, options)

    def build(
        self, seed: int, kind: Callable[..., LocalSGD | DiLoCo], options: dict[str, int]
    ) -> tuple[torch.nn.Module, LocalSGD | DiLoCo, LoneAgent]:
        model, agent = model_of(seed), LoneAgent(step=1, mean=plus_one)
        agent.place = (1, 2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        agent.state = TrainState(model, inner)
        return model, kind(model, inner, agent=agent, **options), agent

    def train(self, model: torch.nn.Module, optimizer: LocalSGD | DiLoCo, numbers: range) -> list[list[int]]:
        """Return the batches."""
        batches, found = iter(StepSampler(50, 2, optimizer)), list[list[int]]()
        for number in numbers:
            found.append(next(batches).tolist())
            inner_step(model, optimizer, number)
        return found


@pytest.mark.parametrize("kind", [LocalSGD, diloco])
@pytest.mark.parametrize("heals", [True, False], ids=["healed in its first quorum", "from a checkpoint"])
def test_a_state_that_was_copied_when_an_outer_step_began_completes_that_step(
    kind: Callable[..., LocalSGD | DiLoCo], heals: bool
) -> None:
    """As a supervisor keeps it, or the last checkpoint before a host ends; or a peer sends it to a resumed rank."""
    it = Resumed(kind, sync_every=H)
    load = lambda: it.resumed_agent.state.load_state_dict(it.copy)  # noqa: E731
    if heals:
        it.resumed_agent.before_slot = load
    else:
        load()
    again = it.train(it.resumed_model, it.resumed, range(H, 3 * H))
    assert again == it.train(it.model, it.optimizer, range(H, 3 * H))
    assert it.resumed_agent.current_step == it.agent.current_step == 4
    assert parameters(it.resumed_model) == parameters(it.model)


def test_one_that_was_copied_with_a_delay_takes_the_inner_steps_that_are_left() -> None:
    it = Resumed(diloco, sync_every=H, delay=1)
    it.resumed_agent.state.load_state_dict(it.copy)
    it.train(it.resumed_model, it.resumed, range(H - 1, H))
    assert it.resumed_agent.asked == it.agent.asked == ["late", "quorum", "vote"]
    assert parameters(it.resumed_model) == parameters(it.model)


def foreign_parameter(agent: LoneAgent) -> object:
    model = model_of()
    inner = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    return LocalSGD(model, inner, agent, sync_every=2)  # type: ignore[arg-type]


def constant_batch(agent: LoneAgent) -> object:
    agent.world_size = WorldSize(WorldSizeMode.CONSTANT_BATCH, 1)
    return local_sgd(agent)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda agent: local_sgd(agent, sync_every=0), "must be at least 1, not 0 and 2"),
        (lambda agent: local_sgd(agent, attempts=0), "must be at least 1, not 3 and 0"),
        (lambda agent: (local_sgd(agent), local_sgd(agent)), "one LocalSGD or DiLoCo per Agent"),
        (constant_batch, "constant_batch"),
        (foreign_parameter, "parameters outside the model"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[LoneAgent], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(LoneAgent(step=1))
