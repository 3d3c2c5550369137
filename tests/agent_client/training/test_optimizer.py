"""The optimizer: a step is voted on, a discarded one leaves every bit as it was, schedulers take it for their own."""

import copy
import hashlib
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from agent_client.errors import ConfigurationError
from agent_client.state.codec import encode
from agent_client.state.train_state import TrainState
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.lone_agent import LoneAgent, back_propagate, model_of, values

OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def wrapped(model: torch.nn.Module, voter: LoneAgent, name: str = "SGD") -> FaultTolerantOptimizer:
    return FaultTolerantOptimizer(OPTIMIZERS[name](model), voter)  # type: ignore[arg-type]


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    return hashlib.sha256(b"".join(encode(state))).hexdigest()


def test_zero_grad_begins_the_step_and_step_votes_on_it() -> None:
    model, voter = model_of(), LoneAgent()
    optimizer = wrapped(model, voter)
    back_propagate(model, 0)
    optimizer.zero_grad()
    assert voter.asked == ["quorum"]
    assert all(parameter.grad is None for parameter in model.parameters())
    back_propagate(model, 1)
    assert optimizer.step() is True
    assert voter.asked == ["quorum", "vote"]


def test_it_has_the_public_attributes_of_the_one_that_it_wraps() -> None:
    """A schedule-free optimizer is told whether the script trains or evaluates. A scaler must still unscale itself."""

    class ScheduleFree(torch.optim.SGD):
        trains = False

        def train(self) -> None:
            self.trains = True

    model = model_of()
    inner = ScheduleFree(model.parameters(), lr=0.1)
    inner._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer = FaultTolerantOptimizer(inner, LoneAgent())  # type: ignore[arg-type]
    optimizer.train()
    assert inner.trains
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert not hasattr(optimizer, "eval")


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_it_would_have_no_agent(copy_of: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\), or copy the optimizer that it wraps"):
        copy_of(wrapped(model_of(), LoneAgent()))


def test_zero_grad_can_keep_the_gradients_memory() -> None:
    model = model_of()
    optimizer = wrapped(model, LoneAgent())
    back_propagate(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@given(st.lists(st.booleans(), max_size=8), st.sampled_from(sorted(OPTIMIZERS)))
def test_with_discards_between_it_is_where_the_committed_steps_alone_lead(decisions: list[bool], name: str) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = wrapped(model, LoneAgent(*decisions), name), OPTIMIZERS[name](plain)
    for step, is_committed in enumerate(decisions):
        optimizer.zero_grad()
        back_propagate(model, step)
        optimizer.step()
        if is_committed:
            reference.zero_grad()
            back_propagate(plain, step)
            reference.step()
    assert bits(model, optimizer) == bits(plain, reference)


@given(st.lists(st.booleans(), max_size=8))
def test_a_loop_that_zeroes_only_what_was_committed_adds_no_gradients_of_discarded_steps(decisions: list[bool]) -> None:
    """What a step leaves that has lost its peer may be anything, and would be in the mean of all groups."""
    model, plain = model_of(), model_of()
    optimizer, reference = wrapped(model, LoneAgent(*decisions)), OPTIMIZERS["SGD"](plain)
    for step, is_committed in enumerate(decisions):
        back_propagate(model, step)
        if not is_committed:
            for parameter in model.parameters():
                parameter.grad.fill_(float("nan"))  # type: ignore[union-attr]
        if optimizer.step():
            optimizer.zero_grad()
            back_propagate(plain, step)
            reference.step()
            reference.zero_grad()
        else:
            assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    assert bits(model, optimizer) == bits(plain, reference)


def test_a_closure_is_called_once_with_gradients_and_before_the_vote() -> None:
    """Lightning's loop computes in it, under no_grad."""
    model, voter = model_of(), LoneAgent(True, False)
    optimizer = wrapped(model, voter)

    def closure() -> str:
        voter.asked.append("closure")
        optimizer.zero_grad()
        back_propagate(model, 0)
        return f"loss {len(voter.asked)}"

    for is_committed in (True, False):
        voter.asked.clear()
        with torch.no_grad():
            assert optimizer.step(closure) is is_committed
        assert voter.asked == ["closure", "vote"]
        assert optimizer.last_loss == "loss 1"
    optimizer.step()
    assert optimizer.last_loss is None


def test_an_optimizer_that_needs_its_closure_several_times_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LBFGS evaluates the model several times in one step"):
        FaultTolerantOptimizer(torch.optim.LBFGS(model_of().parameters()), LoneAgent())  # type: ignore[arg-type]


def test_an_optimizer_that_would_not_heal_is_refused() -> None:
    """As the second one of a GAN that is not registered: the groups would part, step by step."""
    voter, model = LoneAgent(), model_of()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    voter.state = TrainState(model, first)
    FaultTolerantOptimizer(first, voter)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"this SGD is not in .*TrainState\(model, first, second=second\)"):
        FaultTolerantOptimizer(second, voter)  # type: ignore[arg-type]
    voter.state = TrainState(model, first, second=second)
    FaultTolerantOptimizer(second, voter)  # type: ignore[arg-type]


def test_state_goes_through_to_the_wrapped_one() -> None:
    model, voter = model_of(), LoneAgent()
    optimizer = wrapped(model, voter)
    assert optimizer.param_groups is optimizer.wrapped.param_groups
    assert optimizer.state is optimizer.wrapped.state
    assert optimizer.defaults is optimizer.wrapped.defaults
    optimizer.zero_grad()
    back_propagate(model, 0)
    optimizer.step()
    other = model_of(1)
    restored = wrapped(other, voter)
    restored.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    assert bits(other, restored) == bits(model, optimizer)
    extra = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.wrapped.param_groups[-1]["lr"] == 0.5
    assert repr(optimizer).startswith("FaultTolerantOptimizer(SGD")


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 10),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.1, total_steps=20),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it, 0.1, 2), lr_scheduler.ExponentialLR(it, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("takes_wrapper", [True, False], ids=["wrapper", "wrapped"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_either_of_the_two_and_move_with_the_commits(name: str, takes_wrapper: bool) -> None:
    """Warnings are errors here: torch warns of a scheduler that thinks its optimizer has not stepped."""
    decisions = [True, False, True, True, False, True]
    model, plain = model_of(), model_of()
    optimizer, reference = wrapped(model, LoneAgent(*decisions)), OPTIMIZERS["SGD"](plain)
    scheduler = SCHEDULERS[name](optimizer if takes_wrapper else optimizer.wrapped)
    expected = SCHEDULERS[name](reference)
    for step, is_committed in enumerate(decisions):
        optimizer.zero_grad()
        back_propagate(model, step)
        assert optimizer.step() is is_committed
        if is_committed:
            scheduler.step()
            reference.zero_grad()
            back_propagate(plain, step)
            reference.step()
            expected.step()
        assert scheduler.get_last_lr() == expected.get_last_lr()
    assert bits(model, optimizer) == bits(plain, reference)


def test_hooks_of_torch_run_around_a_committed_step() -> None:
    """torch registers them on any Optimizer; a discarded step calls none."""
    model = model_of()
    optimizer = wrapped(model, LoneAgent(False, True))
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    for expected in ([], ["before", "after"]):
        optimizer.zero_grad()
        back_propagate(model, 0)
        optimizer.step()
        assert ran == expected


class TestSeveral:
    def make(self, *decisions: bool) -> tuple[torch.nn.Sequential, list[torch.optim.Optimizer], LoneAgent]:
        model = model_of()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return model, [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)], LoneAgent(*decisions)

    def test_they_are_voted_on_once_and_all_step_or_none(self) -> None:
        model, optimizers, voter = self.make(False, True)
        together = FaultTolerantOptimizer(optimizers, voter)  # type: ignore[arg-type]
        plain, twins, _ = self.make()
        back_propagate(model, 1)
        before = values(list(model.parameters()))
        assert not together.step()
        assert values(list(model.parameters())) == before
        back_propagate(model, 1)
        assert together.step()
        back_propagate(plain, 1)
        for each in twins:
            each.step()
        assert values(list(model.parameters())) == values(list(plain.parameters()))
        assert voter.asked == ["vote", "vote"]
        together.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_they_are_one_for_schedulers_hooks_and_checkpoints(self) -> None:
        _, optimizers, voter = self.make()
        together = FaultTolerantOptimizer(optimizers, voter)  # type: ignore[arg-type]
        called: list[str] = []
        together.register_step_pre_hook(lambda *_: called.append("before"))
        together.register_step_post_hook(lambda *_: called.append("after"))
        scheduler = lr_scheduler.ExponentialLR(together, 0.5)
        together.step()
        scheduler.step()
        assert called == ["before", "after"]
        assert [group["lr"] for each in optimizers for group in each.param_groups] == [0.05, 0.05]
        _, twins, _ = self.make()
        FaultTolerantOptimizer(twins, voter).load_state_dict(together.state_dict())  # type: ignore[arg-type]
        assert [group["lr"] for each in twins for group in each.param_groups] == [0.05, 0.05]
        with pytest.raises(ConfigurationError, match="call add_param_group of the optimizer"):
            together.add_param_group({"params": []})
        with pytest.raises(ConfigurationError, match="the list of optimizers is empty"):
            FaultTolerantOptimizer([], voter)  # type: ignore[arg-type]

    def test_a_vote_of_each_after_one_backward_pass_is_refused(self) -> None:
        model, optimizers, voter = self.make()
        first, second = (FaultTolerantOptimizer(each, voter) for each in optimizers)  # type: ignore[arg-type]
        back_propagate(model, 1)
        assert first.step()
        with pytest.raises(ConfigurationError, match=r"FaultTolerantOptimizer\(\[first, second\], agent\)"):
            second.step()
        voter.all_reduce(torch.ones(1))
        assert second.step(), "it is its turn, as in a GAN"
