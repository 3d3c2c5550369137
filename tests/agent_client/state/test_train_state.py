"""What a peer is given: the state as it was when the step began, whatever the forward pass moves meanwhile."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from agent_client.errors import ConfigurationError
from agent_client.state.snapshot import StateMismatch
from agent_client.state.train_state import Scalers, TrainState
from agent_client.training.optimizer import FaultTolerantScheduler
from tests.agent_client.lone_agent import LoneAgent
from tests.agent_client.state.trees import encoded, over_the_wire


class Counter:
    """Anything of the script's own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Training:
    """A model with buffers that its forward pass moves, an optimizer with momentum, a scheduler, a counter."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.MultiStepLR(self.sgd, [2, 4])
        self.counter = Counter()
        self.state = TrainState(self.model, self.sgd, scheduler=self.scheduler, counter=self.counter)

    def forward(self, step: int) -> torch.Tensor:
        self.counter.count += 1
        return self.model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).square().mean()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.state.begin_step()
            self.sgd.zero_grad()
            self.forward(step).backward()
            self.sgd.step()
            self.scheduler.step()

    def bits(self) -> str:
        self.state.begin_step()
        return hash_of(self.state.snapshot())


class TestSchedulers:
    def test_one_that_drives_the_optimizer_registers_itself(self) -> None:
        training = Training()
        state = TrainState(training.model, training.sgd)
        state.begin_step()
        assert state.others == {"MultiStepLR": training.scheduler}
        other = torch.optim.SGD(training.model.parameters(), lr=0.1)
        kept = lr_scheduler.ExponentialLR(other, 0.9)
        state = TrainState(training.model, other, mine=kept)
        state.begin_step()
        assert state.others == {"mine": kept}

    def test_only_the_outermost_does(self) -> None:
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = [lr_scheduler.LinearLR(sgd), lr_scheduler.ExponentialLR(sgd, 0.9)]
        outer = lr_scheduler.SequentialLR(sgd, parts, [3])
        agent: Any = LoneAgent()
        wrapped = FaultTolerantScheduler(outer, agent)
        state = TrainState(model, sgd)
        state.begin_step()
        assert state.others == {"SequentialLR": wrapped.wrapped}

    def test_two_of_one_class_have_no_order(self) -> None:
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        two = [lr_scheduler.ExponentialLR(sgd, 0.9) for _ in range(2)]
        with pytest.raises(ConfigurationError, match=r"several ExponentialLR.*first=first, second=second"):
            TrainState(model, sgd).begin_step()
        del two


class TestParametersThatMove:
    """A forward pass that writes parameters would be seen by a peer that reads them beside it."""

    def build(self) -> tuple[TrainState, torch.nn.Parameter]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        slow: Any = model[1]
        state = TrainState(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        state.begin_step()
        assert state.find_moved() == ""
        return state, slow.weight

    @pytest.mark.parametrize("how", ["in place", "new memory", "through .data"])
    def test_each_way_of_a_momentum_encoder_is_noticed(self, how: str) -> None:
        state, weight = self.build()
        with torch.no_grad():
            match how:
                case "in place":
                    weight.mul_(0.5)
                case "new memory":
                    weight.data = weight.data * 0.5
                case _:
                    weight.data.mul_(0.5)
        assert state.find_moved() == "1.weight"
        assert (state.stands_still, state.moves_in_forward) == (False, True)
        state.begin_step()
        assert state.find_moved() == ""

    def test_an_embedding_of_bounded_norm_is_noticed(self) -> None:
        model = torch.nn.Embedding(4, 2, max_norm=0.1)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state.begin_step()
        model(torch.arange(4))
        assert state.find_moved() == "weight"

    def test_a_forward_pass_and_an_optimizer_between_steps_are_none(self) -> None:
        training = Training()
        for step in range(3):
            training.state.begin_step()
            training.forward(step).backward()
            assert training.state.find_moved() == ""
            training.sgd.step()
        assert training.state.stands_still


class TestSendable:
    def test_the_path_of_what_cannot_be_sent(self) -> None:
        training = Training()
        training.train(1)
        training.state.check_sendable()
        training.sgd.state[training.model[0].weight]["seen"] = {1}  # type: ignore[index]
        with pytest.raises(ConfigurationError, match=r"state\['optimizer'\]\['state'\]\[0\]\['seen'\] is a set"):
            training.state.check_sendable()

    def test_what_is_registered_beside_has_its_name_in_the_path(self) -> None:
        training = Training()
        training.counter.count = {1}  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"state\['others'\]\['counter'\]\['count'\] is a set"):
            training.state.begin_step()

    def test_a_state_dict_that_raises(self) -> None:
        training = Training()
        training.train(1)

        def raises() -> Any:
            raise RuntimeError("Optimizer state has not been consolidated")

        training.sgd.state_dict = raises  # type: ignore[method-assign]
        with pytest.raises(ConfigurationError, match="could heal from this state: Optimizer state has not been consol"):
            training.state.check_sendable()

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_sparse_buffer_is_sent_to_nobody(self, persistent: bool) -> None:
        """As the adjacency of a graph. One that state_dict() leaves out need not be sent."""
        training = Training()
        training.model.register_buffer("adjacency", torch.eye(4).to_sparse(), persistent=persistent)
        training.state.begin_step()
        if persistent:
            with pytest.raises(ConfigurationError, match=r"\['adjacency'\] is a torch.* with layout torch.sparse_coo"):
                training.state.check_sendable()
        else:
            training.state.check_sendable()
            assert training.state.snapshot()

    def test_an_expanded_buffer_cannot_be_written(self) -> None:
        training = Training()
        training.model.register_buffer("mask", torch.ones(4).expand(3, 4))
        training.state.begin_step()
        with pytest.raises(ConfigurationError, match=r"state\['model'\]\['mask'\] is expanded.*contiguous"):
            training.state.check_sendable()


FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adagrad": torch.optim.Adagrad,
}


class TestMemoryOrder:
    """Fused optimizers go by memory order: a parameter, its gradient and its moments must have the same one."""

    def build(self, kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        convolutions = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 1, 3), torch.nn.Conv2d(1, 4, 1)
        model = torch.nn.Sequential(*convolutions, torch.nn.Flatten(), torch.nn.Linear(64, 6))
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        linear: Any = model[-1]
        linear.weight = torch.nn.Parameter(torch.randn(64, 6).t())
        return model, FUSED[kind](model.parameters(), lr=1e-2, fused=True)

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(images.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()

    @pytest.mark.parametrize("is_copied", [True, False])
    @pytest.mark.parametrize("kind", FUSED)
    def test_a_fused_optimizer_goes_on_with_the_same_bits(self, kind: str, is_copied: bool) -> None:
        model, optimizer = self.build(kind)
        for number in range(3):
            self.step(model, optimizer, number)
        other, other_optimizer = self.build(kind)
        served = TrainState(model, optimizer)
        content = over_the_wire(served.snapshot() if is_copied else served.in_place())
        TrainState(other, other_optimizer).load_state_dict(content)
        for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
            kept = zip(optimizer.state[parameter].items(), other_optimizer.state[theirs].values(), strict=True)
            assert [name for (name, one), two in kept if one.stride() != two.stride()] == []
        self.step(model, optimizer, 9)
        self.step(other, other_optimizer, 9)
        for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, theirs)

    def test_what_has_gaps_or_overlaps_comes_back_without(self) -> None:
        state = [
            torch.arange(12.0).view(3, 4)[:, ::2],
            torch.arange(3.0).expand(2, 3),
            torch.arange(8.0).view(4, 2)[::2].t(),
        ]
        back = over_the_wire(state)
        assert [tensor.stride() for tensor in back] == [(2, 1), (3, 1), (1, 2)]
        assert all(map(torch.equal, back, state))


def hash_of(state: Any) -> str:
    return hashlib.sha256(encoded(state)).hexdigest()


def test_a_snapshot_is_the_state_when_the_step_began() -> None:
    training = Training()
    training.train(0, 1)
    before = training.bits()
    training.forward(2).backward()  # moves the buffers and the counter
    training.forward(3)
    assert hash_of(training.state.snapshot()) == before
    training.state.begin_step()
    assert hash_of(training.state.snapshot()) != before


def test_what_is_installed_trains_on_bit_for_bit_as_its_source() -> None:
    source, target = Training(0), Training(1)
    source.train(*range(5))
    target.train(7)
    source.state.begin_step()
    received = over_the_wire(source.state.snapshot())
    target.state.check(received)
    target.state.install(received)
    assert target.bits() == source.bits()
    for training in (source, target):
        training.train(5, 6)
    assert target.bits() == source.bits()
    assert target.scheduler.get_last_lr() == source.scheduler.get_last_lr()
    assert target.counter.count == source.counter.count


class MixedDtypes(torch.optim.Optimizer):
    """Keeps float32 weights, 8-bit codes, counts and a word for its parameters, which are bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                codes = torch.zeros_like(parameter, dtype=torch.uint8)
                state.update(weights=parameter.float(), codes=[codes, (torch.tensor(2**40),)], form="dense")
            state["codes"][0].add_(3)
            state["codes"][1][0].add_(1)
            parameter.copy_(state["weights"].sub_(parameter.grad.float(), alpha=0.01))


@pytest.mark.parametrize("is_other", [False, True])
def test_an_optimizer_keeps_the_dtypes_of_its_state(is_other: bool) -> None:
    """torch's load_state_dict casts everything to the dtype of the parameter."""

    def build(seed: int) -> tuple[torch.nn.Linear, MixedDtypes, TrainState]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        mixed = MixedDtypes(model.parameters())
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        return model, mixed, TrainState(model, sgd, mixed=mixed) if is_other else TrainState(model, mixed)

    source, target = build(0), build(1)
    for model, mixed, _ in (source, target):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum().backward()
        mixed.step()
    source[2].begin_step()
    target[2].load_state_dict(over_the_wire(source[2].snapshot()))
    for parameter, theirs in zip(source[0].parameters(), target[0].parameters(), strict=True):
        assert hash_of(dict(target[1].state[theirs])) == hash_of(dict(source[1].state[parameter]))


def other_buffer(received: dict[str, Any]) -> None:
    received["model"]["1.running_mean"] = torch.zeros(7)


def other_optimizer(received: dict[str, Any]) -> None:
    received["optimizer"] = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).state_dict()


def more_groups(received: dict[str, Any]) -> None:
    received["optimizer"]["param_groups"] *= 2


def no_scheduler(received: dict[str, Any]) -> None:
    del received["others"]["scheduler"]


@pytest.mark.parametrize(
    "damage", [other_buffer, other_optimizer, more_groups, no_scheduler, dict.clear], ids=lambda damage: damage.__name__
)
def test_what_does_not_fit_is_refused_and_touches_nothing(damage: Callable[[dict[str, Any]], None]) -> None:
    source, target = Training(0), Training(1)
    for training in (source, target):
        training.train(0)
    source.state.begin_step()
    received = over_the_wire(source.state.snapshot())
    damage(received)
    before = target.bits()
    with pytest.raises(StateMismatch):
        target.state.check(received)
    assert target.bits() == before


@pytest.mark.parametrize("received", [None, [], "text", 3, {"model": None, "optimizer": None, "others": None}])
def test_what_is_no_state_at_all_is_refused(received: Any) -> None:
    with pytest.raises(StateMismatch):
        Training().state.check(received)


def test_a_buffer_that_two_modules_share_is_taken_as_it_was_too() -> None:
    """state_dict() names it twice, and the second name is what a peer loads last."""
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(norm, torch.nn.Linear(4, 4), norm)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.begin_step()
    before = hash_of(state.snapshot())
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert hash_of(state.snapshot()) == before


def test_buffers_inside_torch_s_checkpoint_wrapper_are_taken_as_they_were_too() -> None:
    """state_dict() leaves the wrapper's part out of their names, and named_buffers() does not."""
    torch.manual_seed(0)
    wrapped = checkpoint_wrapper(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), wrapped)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        state.begin_step()
        before = hash_of(state.snapshot())
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).sum().backward()
        assert hash_of(state.snapshot()) == before


class Counting(torch.nn.Module):
    """Its extra state, not a buffer, counts its forward passes."""

    def __init__(self, seen: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: Any = seen

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen["passes"] += 1
        return batch * self.weight

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("first", [0, torch.zeros(2)], ids=["number", "tensor"])
def test_a_module_s_extra_state_is_taken_as_it_was_too(first: object) -> None:
    source, target = (torch.nn.Sequential(Counting({"passes": first})) for _ in range(2))
    state, other = (TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (source, target))
    for _ in range(2):
        state.begin_step()
        before = hash_of(state.snapshot())
        source(torch.ones(1))
        received = over_the_wire(state.in_place())
        assert hash_of(received) == before
    other.load_state_dict(received)
    other.begin_step()
    assert hash_of(other.snapshot()) == before


@pytest.mark.parametrize("first", [0, torch.zeros(2)], ids=["number", "tensor"])
def test_an_extra_state_that_changes_in_the_forward_pass_is_named(first: object) -> None:
    model = torch.nn.Sequential(Counting({"passes": first}))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        state.begin_step()
        assert state.find_moved_extra_state() == ""
        model(torch.ones(1))
        assert state.find_moved_extra_state() == "0._extra_state"


class Tensors:
    """Stands still from a step's begin to its vote: the global parameters of DiLoCo, say."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((1000,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensor.copy_(state_dict["tensor"])


def addresses(state: Any) -> set[int]:
    if isinstance(state, torch.Tensor):
        return {state.data_ptr()}
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return set().union(*map(addresses, children))


class TestInPlace:
    def test_is_the_state_when_the_step_began_without_a_copy_of_what_stands_still(self) -> None:
        training = Training()
        training.train(0, 1)
        training.state.standing["outer"] = Tensors(1.0)
        before = training.bits()
        training.forward(2).backward()
        in_place = training.state.in_place()
        assert hash_of(in_place) == before
        still = addresses(
            [*training.model.parameters(), training.sgd.state_dict(), training.state.standing["outer"].tensor]
        )
        moving = addresses(list(training.model.buffers()))
        assert addresses(in_place) >= still
        assert not addresses(in_place) & moving

    def test_further_optimizers_stand_still_too(self) -> None:
        """A copy of their moments in each step would take longer than many a step."""
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        sgd, adam = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())
        state = TrainState(model, sgd, adam=adam, scheduler=torch.optim.lr_scheduler.ExponentialLR(adam, 0.9))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            adam.step()
        state.begin_step()
        in_place: Any = state.in_place()
        assert list(in_place["others"]) == ["adam", "scheduler"]
        assert addresses(in_place) >= addresses(adam.state_dict())
        assert hash_of(over_the_wire(state.snapshot())) == hash_of(in_place)

    def test_a_snapshot_copies_that_too(self) -> None:
        training = Training()
        training.train(0)
        training.state.begin_step()
        assert not addresses(training.state.snapshot()) & addresses(training.state.in_place())

    def test_a_peer_without_it_does_not_fit(self) -> None:
        source, target = Training(0), Training(1)
        target.state.standing["outer"] = Tensors(2.0)
        source.state.begin_step()
        with pytest.raises(StateMismatch, match=r"\['standing'\]\['outer'\]: missing"):
            target.state.check(source.state.in_place())


class NativeScaler:
    """timm's: it holds torch's."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=1)

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)


def test_a_scaler_inside_an_entry_is_put_back_too() -> None:
    """After a discarded step, which other groups may have missed."""
    training, wrapper = Training(), NativeScaler()
    scalers = Scalers(TrainState(training.model, training.sgd, scaler=wrapper))
    assert scalers.may_skip
    scaler = wrapper.scaler
    scaler.scale(torch.ones(1))
    scalers.begin_step()
    scaler.scale(training.forward(0)).backward()
    scaler.step(training.sgd)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert scalers.has_state_changed
    scalers.restore()
    assert scaler.get_scale() == 8.0
    assert not scalers.has_state_changed


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"scheduler": None}, "scheduler is a NoneType and has no state_dict"),
        ({"optimizer": []}, "optimizer is a list and has no param_groups"),
        ({"model": Counter()}, "model is a Counter and has no named_parameters"),
    ],
)
def test_what_is_no_state_is_named(wrong: dict[str, Any], named: str) -> None:
    training = Training()
    arguments: dict[str, Any] = {"model": training.model, "optimizer": training.sgd, **wrong}
    with pytest.raises(ConfigurationError, match=f"^TrainState: {named}: pass one module"):
        TrainState(**arguments)


def test_a_state_dict_is_the_state_now_and_can_be_loaded() -> None:
    source, target = Training(0), Training(1)
    source.train(*range(3))
    state = over_the_wire(source.state.state_dict())
    target.state.load_state_dict(state)
    assert target.bits() == source.bits()
    with pytest.raises(StateMismatch):
        Training(width=7).state.load_state_dict(state)
