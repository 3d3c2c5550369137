"""What would make the groups of a script differ is refused at its first step, with the way out."""

import gc
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import parallel
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import ConfigurationError
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.rules.machine import Applying
from agent_client.step.script_check import (
    OptimizerWatch,
    ScheduleWatch,
    refuse_live_objects,
    refuse_model,
    refuse_optimizer,
    refuse_unhealed,
    warn_of_split_samplers,
)
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.hsdp import replicate
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.lone_agent import LoneAgent


class ZeroRedundancyOptimizer(SGD):
    """Recognised by its name, as torch's: importing that takes long."""


class FullyShardedDataParallel(nn.Module):
    """The same."""


class Sam(SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


@pytest.fixture
def state() -> TrainState:
    model = nn.Linear(3, 2)
    return TrainState(model, SGD(model.parameters(), lr=0.1))


@pytest.fixture
def group() -> Iterator[Any]:
    group = GlooGroup(HashStore(), 0, 1, "127.0.0.1", connect_timeout_s=10.0, timeout_s=10.0)
    yield group.for_torch("check")
    group.abort()


def test_an_optimizer_that_keeps_a_part_of_its_state_in_each_rank(state: TrainState) -> None:
    with pytest.raises(ConfigurationError, match=r"ZeRO-1.*fully_shard \(FSDP2\) and agent_client.replicate"):
        refuse_optimizer(ZeroRedundancyOptimizer(state.model.parameters()))
    refuse_optimizer(state.optimizer, votes_each_step=True)


def test_an_optimizer_that_needs_two_backward_passes(state: TrainState) -> None:
    agent: Any = LoneAgent()
    with pytest.raises(ConfigurationError, match=r"SAM.*two backward passes.*agent\.applying"):
        FaultTolerantOptimizer(Sam(state.model.parameters()), agent)
    refuse_optimizer(Sam(state.model.parameters()), votes_each_step=False)


def test_modules_that_cannot_be_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = nn.Sequential(FullyShardedDataParallel())
    with pytest.raises(ConfigurationError, match=r"^0 is a FullyShardedDataParallel \(FSDP1\)"):
        refuse_model(sharded)
    agent: Any = SimpleNamespace(internals=SimpleNamespace(refuse_catch_up=lambda what: None))
    with pytest.raises(ValueError, match=r"^0 is a FullyShardedDataParallel \(FSDP1\).*fully_shard"):
        replicate(sharded, agent)
    stepping = nn.Linear(2, 2)
    _apply_optimizer_in_backward(SGD, stepping.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigurationError, match="weight has an optimizer in its backward pass.*after the vote"):
        refuse_model(stepping)
    refuse_model(nn.Linear(2, 2))
    monkeypatch.setattr("agent_client.step.script_check.is_sharded", lambda parameter: True)
    with pytest.raises(ConfigurationError, match=r"weight is a DTensor.*within_group=False"):
        refuse_model(nn.Linear(2, 2))


def test_an_optimizer_that_steps_in_the_backward_pass(state: TrainState) -> None:
    watch = OptimizerWatch(state, Applying())
    others = nn.Linear(3, 2)
    try:
        for model in (others, state.model):
            for parameter in model.parameters():
                optimizer = SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        others(torch.ones(1, 3)).sum().backward()
        with pytest.raises(
            ConfigurationError, match="SGD steps inside the backward pass: an optimizer must step after"
        ):
            state.model(torch.ones(1, 3)).sum().backward()
        state.optimizer.step()
    finally:
        watch.close()


def test_a_torch_ddp_in_place_of_ours(state: TrainState, group: Any) -> None:
    wrapped = parallel.DistributedDataParallel(state.model, process_group=group)
    with pytest.raises(ConfigurationError, match="torch's own DistributedDataParallel is around the model"):
        refuse_live_objects(state, has_reduced=False)
    refuse_live_objects(state, has_reduced=True)  # the script reduces over the groups by hand
    refuse_live_objects(TrainState(nn.Linear(1, 1), state.optimizer), has_reduced=False)
    del wrapped


def test_a_torch_ddp_around_another(state: TrainState, group: Any) -> None:
    wrapped = parallel.DistributedDataParallel(
        parallel.DistributedDataParallel(state.model, process_group=group), process_group=group
    )
    with pytest.raises(ConfigurationError, match="around ours.*FaultTolerantAccelerator"):
        refuse_live_objects(state, has_reduced=True)
    del wrapped


def test_a_scaler_that_would_not_heal(state: TrainState) -> None:
    scaler = torch.amp.GradScaler("cpu")
    refuse_live_objects(state, has_reduced=True)
    scaler.scale(torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"TrainState\(model, optimizer, scaler=scaler\)"):
        refuse_live_objects(state, has_reduced=True)
    refuse_live_objects(TrainState(state.model, state.optimizer, scaler=scaler), has_reduced=True)
    holder: Any = SimpleNamespace(inner=scaler, state_dict=dict)
    refuse_live_objects(TrainState(state.model, state.optimizer, holder=holder), has_reduced=True)


def test_a_scheduler_that_came_too_late_to_be_registered(state: TrainState) -> None:
    state.begin_step()
    scheduler = lr_scheduler.ExponentialLR(state.optimizer, 0.9)
    with pytest.raises(ConfigurationError, match=r"ExponentialLR.*TrainState\(model, optimizer, scheduler=scheduler\)"):
        refuse_live_objects(state, has_reduced=True)
    del scheduler


def test_an_average_of_the_weights_that_would_not_heal_is_told(
    state: TrainState, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # averages of other tests
    average: Any = AveragedModel(state.model)
    refuse_live_objects(TrainState(state.model, state.optimizer, average=average), has_reduced=True)
    assert not caplog.messages
    refuse_live_objects(state, has_reduced=True)
    [told] = caplog.messages
    assert "TrainState(model, optimizer, average=average)" in told


def test_an_optimizer_of_parameters_that_no_registered_one_has_is_told_once(
    state: TrainState, caplog: pytest.LogCaptureFixture
) -> None:
    critic = nn.Linear(2, 2)
    watch, critics = OptimizerWatch(state, Applying()), SGD(critic.parameters(), lr=0.1)
    try:
        state.optimizer.step()
        SGD(state.model.parameters(), lr=0.1).step()  # as one that wraps it
        state.standing["outer"] = state.others["critic"] = SimpleNamespace()  # type: ignore[assignment]
        critics.step()  # DiLoCo's outer optimizer
        state.standing.clear()
        assert not caplog.messages
        critics.step()
        critics.step()
        [told] = caplog.messages
        assert "a SGD that is not in the Agent's TrainState has stepped: it also steps when the groups discard" in told
    finally:
        watch.close()


def test_a_scheduler_that_the_script_steps_after_a_discard_is_told_once(
    state: TrainState, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = state.others["scheduler"] = lr_scheduler.ExponentialLR(state.optimizer, 0.9)
    state.optimizer.step()  # else torch warns
    watch = ScheduleWatch(state)
    watch.check_discarded()  # before the first step
    watch.begin_step()
    watch.check_discarded()
    assert not caplog.messages
    for _ in range(2):
        scheduler.step()
        watch.check_discarded()
        watch.begin_step()
    [told] = caplog.messages
    assert "stepped its ExponentialLR after a discarded step" in told
    assert "FaultTolerantScheduler" in told


def test_gradients_that_only_accumulated_are_not_applied(state: TrainState) -> None:
    """A script whose last batches of an epoch are fewer, and whose no_sync() does not know it."""
    [*parameters] = state.model.parameters()
    with Agent("127.0.0.1:1", state=state) as agent:
        internals = agent.internals
        internals.parts = [SimpleNamespace(parameters_reduced=parameters)]  # type: ignore[list-item]
        internals.machine.record_compute(accumulates=True)
        internals._check_script()
        parameters[0].grad = torch.ones_like(parameters[0])
        with pytest.raises(ConfigurationError, match=r"its last backward pass ran under no_sync\(\)"):
            internals._check_script()
        internals.machine.reductions = 1
        internals._check_script()
        internals.machine.reductions = 0
        internals.machine.record_compute()
        internals._check_script()


def test_gradients_that_bypass_the_agent_are_not_applied(state: TrainState) -> None:
    """The model was not wrapped, or the script calls it in place of its wrapper. A loop of its own may do so."""
    state.model(torch.ones(1, 3)).sum().backward()
    with Agent("127.0.0.1:1", state=state) as agent:
        internals = agent.internals
        internals._check_script()
        optimizer = FaultTolerantOptimizer(state.optimizer, agent)
        internals._check_script()  # the first step has shown how the script averages
        for reductions, failure, has_gradients in [(1, None, True), (0, "found bad", True), (0, None, False)]:
            internals._is_checked = False
            internals.machine.reductions, internals.machine.failure = reductions, failure
            if not has_gradients:
                optimizer.wrapped.zero_grad()
            internals._check_script()
        internals._is_checked = False
        state.model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ConfigurationError, match=r"that of weight did not go .* call the wrapper instead"):
            internals._check_script()


def test_a_loss_with_parameters_that_is_not_wrapped_is_not_trained() -> None:
    """It is in the state, as a refusal advises, so that each group has one that heals, and trains it alone."""
    model = nn.ModuleDict({"net": nn.Linear(3, 2), "loss": nn.Linear(2, 1)})
    state = TrainState(model, SGD(model.parameters(), lr=0.1))
    model["loss"](model["net"](torch.ones(1, 3))).sum().backward()
    with Agent("127.0.0.1:1", state=state) as agent:
        internals = agent.internals
        FaultTolerantOptimizer(state.optimizer, agent)
        internals.parts = [SimpleNamespace(module=model["net"], parameters_reduced=())]  # type: ignore[list-item]
        internals.begin_backward()
        internals.end_backward()
        internals.machine.reductions = 2  # the second one is the script's own
        internals._check_script()
        internals._is_checked, internals.machine.reductions = False, 1
        with pytest.raises(ConfigurationError, match=r"that of loss\.weight did not go .* wrap each module"):
            internals._check_script()


def test_join_is_not_for_groups_that_come_and_go() -> None:
    with pytest.raises(ConfigurationError, match="StepLoader"):
        DistributedDataParallel.join(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicas", "shuffle", "is_told"),
    [(2, True, True), (1, True, True), (4, True, False), (2, False, False)],
    ids=["of the group", "of one", "of all groups", "of an evaluation"],
)
def test_data_that_are_divided_among_the_ranks_of_one_group(
    caplog: pytest.LogCaptureFixture, replicas: int, shuffle: bool, is_told: bool
) -> None:
    gc.collect()  # samplers of other tests
    sampler = DistributedSampler(range(100), replicas, 0, shuffle=shuffle)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        warn_of_split_samplers(2, 2)
    told = f"divides its 100 samples among the {replicas} ranks of this replica group only: each of the 2 groups"
    assert (told in caplog.text) == is_told, sampler


def test_a_sampler_of_the_scripts_own_that_calls_no_init_of_torchs() -> None:
    class Balanced(DistributedSampler[int]):
        def __init__(self) -> None:
            """It draws from the labels."""

    sampler = Balanced()
    warn_of_split_samplers(2, 2)
    del sampler


class TestWhatAnOptimizerUpdates:
    """It must be in the state: a group that heals would keep its own."""

    def loss(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 2)

    def test_a_loss_with_parameters_beside_the_model(self) -> None:
        model, loss = torch.nn.Linear(4, 4), self.loss()
        adam = torch.optim.Adam([*model.parameters(), *loss.parameters()])
        with pytest.raises(ConfigurationError, match=r"Adam updates a parameter of shape \(2, 4\).*nn\.ModuleList"):
            refuse_unhealed(TrainState(model, adam))
        refuse_unhealed(TrainState(torch.nn.ModuleList([model, loss]), adam))
        refuse_unhealed(TrainState(model, adam, loss=loss))

    def test_the_model_of_a_second_optimizer(self) -> None:
        model, critic = torch.nn.Linear(4, 4), self.loss()
        sgd, adam = torch.optim.SGD(model.parameters()), torch.optim.Adam(critic.parameters())
        with pytest.raises(ConfigurationError, match=r"Adam updates a parameter of shape \(2, 4\)"):
            refuse_unhealed(TrainState(model, sgd, adam=adam))
        refuse_unhealed(TrainState(model, sgd, adam=adam, critic=critic))
