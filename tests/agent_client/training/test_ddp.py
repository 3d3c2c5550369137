"""torch's DDP under an Agent: its buckets must be the same in a replica that has trained and in one that is new."""

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.nn import parallel

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.observed import ObservedGroup
from agent_client.errors import ConfigurationError
from agent_client.progress.progress import Progress
from agent_client.step.rules.loop_order import StepPart
from agent_client.step.rules.world_size import WorldSize, WorldSizeMode
from agent_client.step.runner import BackgroundThread
from agent_client.training.ddp import DistributedDataParallel, _name_in
from tests.agent_client.lone_agent import LoneAgent
from tests.processes import LOCALHOST, PATIENCE_S

SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
FIND_UNUSED = {"find_unused_parameters": True}


class Tower(torch.nn.Module):
    """Used in another order than it is registered in, so that torch would want to lay its buckets out anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [(8, 16), (16, 24), (24, 12), (12, 20), (20, 4)]
        layers = [torch.nn.Linear(*width) for width in widths]
        self.registered = torch.nn.ModuleList([layers[at] for at in (2, 0, 4, 1, 3)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for at in (1, 3, 0, 4, 2):
            images = torch.tanh(self.registered[at](images))
        return images


class Branches(torch.nn.Module):
    """A batch decides which of two branches it goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(8, 8)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])

    def forward(self, images: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.stem(images))


def strided() -> torch.nn.Sequential:
    """Its parameters lie in memory in another order than contiguous ones: channels_last, and transposed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2, bias=False))
    model[-1].weight = torch.nn.Parameter(torch.randn(16, 2).t())
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class Peers(LoneAgent):
    """An agent whose peers' buckets are known beforehand: all_reduce is the mean with theirs, on another thread."""

    def __init__(self, *peers: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.state = SimpleNamespace(model=torch.nn.Module())
        self.progress = Progress()
        self.parts: list[StepPart] = []
        self.peers = list(peers)
        self.thread = BackgroundThread("reduces")
        self._group = GlooGroup(HashStore(), 0, 1, LOCALHOST, connect_timeout_s=60.0, timeout_s=60.0)

    has_failed = False
    tag, ended, has_peers = None, 0, False
    reductions = property(lambda self: len(self.seen))

    def begin_forward(self, part: StepPart, *, accumulates: bool = False) -> None:
        """A step is under way."""

    def add_part(self, part: StepPart) -> None:
        self.parts.append(part)

    def begin_backward(self) -> None:
        self.is_in_backward = True

    def end_backward(self) -> None:
        self.is_in_backward = False

    def group_for_torch(self) -> ObservedGroup:
        return ObservedGroup(self._group.for_torch("torch/0"), self.progress)

    def all_reduce(self, tensor: torch.Tensor, **_: object) -> "Future[torch.Tensor]":
        return self.thread.submit(lambda: self._reduce(tensor))

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        at = len(self.seen)
        self.seen.append(tensor.clone())
        for peer in self.peers:
            tensor += peer[at]
        tensor /= 1 + len(self.peers)
        return tensor

    def meet(self, *peers: list[torch.Tensor]) -> None:
        self.seen, self.peers = [], list(peers)

    def close(self) -> None:
        self.thread.close(PATIENCE_S)
        self._group.abort()


class HealingPeers(Peers):
    """The same in a replica that heals: it adds zeros, and they are not counted."""

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.zero_()
        return super()._reduce(tensor).mul_((1 + len(self.peers)) / max(1, len(self.peers)))


class LosingPeers(Peers):
    """The same in a step that loses its peer: nothing is reduced."""

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.has_failed = True
        return tensor.zero_()


def ours(module: torch.nn.Module, agent: Peers, **options: Any) -> parallel.DistributedDataParallel:
    return DistributedDataParallel(module, agent, **options)  # type: ignore[arg-type]


@contextmanager
def peers(kind: type[Peers] = Peers) -> Iterator[Peers]:
    agent = kind()
    try:
        yield agent
    finally:
        agent.close()


def images(step: int, place: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + place))


def backward(model: torch.nn.Module, step: int, place: int, *more: int) -> None:
    model.zero_grad()
    model(images(step, place), *more).square().mean().backward()


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_the_last_layers_gradients_are_reduced_first() -> None:
    """They are computed first: what is reduced last is not overlapped with anything."""
    with peers() as agent:
        first, last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 16)
        model = ours(torch.nn.Sequential(first, last), agent, **SMALL_BUCKETS)
        backward(model, 0, 0)
        sizes = [len(bucket) for bucket in agent.seen]
        assert sizes == [last.bias.numel() + last.weight.numel(), first.bias.numel() + first.weight.numel()]


@pytest.mark.parametrize("options", [{}, FIND_UNUSED, {"gradient_as_bucket_view": True}])
def test_the_buckets_stay_as_they_are(options: dict[str, Any]) -> None:
    with peers() as agent:
        model = ours(Tower(), agent, **SMALL_BUCKETS, **options)
        layouts: list[list[int]] = []
        for step in range(5):
            agent.meet()
            backward(model, step, 0)
            layouts.append([len(bucket) for bucket in agent.seen])
        assert layouts == [layouts[0]] * 5
        assert len(layouts[0]) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"process_group": object()},
        {"skip_all_reduce_unused_params": True},
        {"mixed_precision": object()},
        {"delay_all_reduce_named_params": [("weight", None)]},
    ],
)
def test_options_that_would_move_the_buckets_are_refused(options: dict[str, Any]) -> None:
    with peers() as agent, pytest.raises(ValueError, match=f"^{next(iter(options))}: .* leave it out"):
        ours(Tower(), agent, **options)


@pytest.mark.parametrize("options", [{}, FIND_UNUSED])
def test_a_parameter_that_is_thawed_later_is_named(options: dict[str, Any]) -> None:
    """torch's reducer leaves it out, so each replica would move it by gradients of its own."""
    with peers() as agent:
        tower = Tower()
        thawed: Any = tower.registered[2]
        thawed.weight.requires_grad_(False)
        model: Any = ours(tower, agent, **options)
        backward(model, 0, 0)
        model.share_buffers()
        thawed.weight.requires_grad_(True)
        model.share_buffers()
        agent.meet(agent.seen)
        backward(model, 1, 0)
        with pytest.raises(ConfigurationError, match=r"^registered\.2\.weight was frozen .* again after you unfreeze"):
            model.share_buffers()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_parameter_that_comes_later_is_named(is_replaced: bool) -> None:
    """A new head, or weights that load_state_dict(assign=True) has put in place of those that were wrapped."""
    with peers() as agent:
        tower: Any = Tower()
        model: Any = ours(tower, agent, **FIND_UNUSED)
        backward(model, 0, 0)
        model.share_buffers()
        if is_replaced:
            tower.load_state_dict({name: each.clone() for name, each in tower.state_dict().items()}, assign=True)
        else:
            tower.registered[2] = torch.nn.Linear(20, 4)
        agent.meet()
        backward(model, 1, 0)
        with pytest.raises(ConfigurationError, match=r"^registered\.[02]\.weight was frozen or missing .* or replace"):
            model.share_buffers()


def test_replicas_agree_on_a_parameter_that_only_one_of_them_used() -> None:
    """Its gradient is the mean with zeros in both: else one replica moves it and the other does not."""
    with peers() as first_agent, peers() as second_agent:
        first, second = ours(Branches(), first_agent, **FIND_UNUSED), ours(Branches(), second_agent, **FIND_UNUSED)
        backward(first, 0, 0, 0)
        backward(second, 0, 1, 1)
        of_first = first_agent.seen
        first_agent.meet(second_agent.seen)
        backward(first, 0, 0, 0)
        second_agent.meet(of_first)
        backward(second, 0, 1, 1)
        for one, other in zip(gradients(first), gradients(second), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_a_parameter_that_no_replica_used_gets_no_gradient() -> None:
    """Zeros instead would let momentum and weight decay move it."""
    with peers() as agent:
        model = ours(Branches(), agent, **FIND_UNUSED)
        backward(model, 0, 0, 0)
        agent.meet(agent.seen)
        backward(model, 0, 0, 0)
        assert [gradient is None for gradient in gradients(model)] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("options", [FIND_UNUSED, {**FIND_UNUSED, "gradient_as_bucket_view": True}])
def test_what_only_a_healing_replica_used_gets_no_gradient_there_either(options: dict[str, Any]) -> None:
    """It counts for nothing, so its peers have none."""
    with peers() as agent, peers(HealingPeers) as healing_agent:
        model, healing = ours(Branches(), agent, **options), ours(Branches(), healing_agent, **options)
        backward(model, 0, 0, 0)
        healing_agent.meet(agent.seen)
        backward(healing, 0, 1, 1)
        for one, other in zip(gradients(model), gradients(healing), strict=True):
            assert (one is None) is (other is None)
            assert one is None or other is None or torch.equal(one, other)


def test_a_step_that_has_lost_its_peer_keeps_its_gradients_until_its_vote() -> None:
    """A GradScaler that finds none raises before that, and would end the survivor."""
    with peers(LosingPeers) as agent:
        model = ours(Branches(), agent, **FIND_UNUSED)
        backward(model, 0, 0, 0)
        assert [gradient is None for gradient in gradients(model)] == [False] * 4 + [True] * 2


def test_a_backward_pass_after_its_batch_was_skipped_is_refused() -> None:
    """As of a script that draws its next batch before it: it would reduce nothing, and move each group on its own."""
    with peers() as agent:
        model: Any = ours(Tower(), agent)
        loss, other = (model(images(0, place)).square().mean() for place in range(2))
        assert model.contribute_zeros()
        for each in (loss, other):
            with pytest.raises(ConfigurationError, match=r"draw the next batch after optimizer\.step\(\)"):
                each.backward()
        backward(model, 1, 0)


class TestAnotherPassAfterTheReduction:
    """torch reduces in one backward pass for each forward pass. Gradients of another one are each group's own."""

    def once_more(self, model: Any) -> torch.Tensor:
        """A step with two losses, each with a pass of its own through the same graph."""
        outputs = model(images(0, 0))
        outputs.square().mean().backward(retain_graph=True)
        return outputs.mean()

    def test_it_is_not_applied(self) -> None:
        with peers() as agent:
            model: Any = ours(Tower(), agent)
            loss = self.once_more(model)
            model.share_buffers()
            loss.backward()
            with pytest.raises(ConfigurationError, match=r"were not averaged .* add the losses"):
                model.share_buffers()

    def test_of_two_forward_passes_the_first_backward_pass_reduces_for_both(self) -> None:
        with peers() as agent:
            model: Any = ours(Tower(), agent)
            losses = [model(images(0, place)).square().mean() for place in range(2)]
            for loss in losses:
                loss.backward()
            with pytest.raises(ConfigurationError, match="add the losses"):
                model.share_buffers()

    def test_only_the_last_pass_of_a_step_averages_what_the_others_accumulate(self) -> None:
        with peers() as agent:
            model: Any = ours(Tower(), agent)
            for averages in (False, True, False):
                with nullcontext() if averages else model.no_sync():
                    model(images(0, 0)).square().mean().backward()
            with pytest.raises(ConfigurationError, match=r"only passes before the last one under no_sync\(\)"):
                model.share_buffers()
            model(images(0, 1)).square().mean().backward()
            model.share_buffers()

    def test_a_script_may_average_the_rest_itself(self) -> None:
        with peers() as agent:
            model: Any = ours(Tower(), agent)
            self.once_more(model).backward()
            for parameter in model.parameters():
                agent.all_reduce(parameter.grad).result()
            model.share_buffers()

    def test_what_changes_no_gradient_or_belongs_to_no_step_is_of_no_interest(self) -> None:
        with peers() as agent:
            model: Any = ours(Tower(), agent)
            inputs = images(0, 0).requires_grad_()
            outputs = model(inputs)
            outputs.square().mean().backward(retain_graph=True)
            torch.autograd.grad(outputs.mean(), inputs, retain_graph=True)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            model.share_buffers()
            agent.ended += 1
            outputs.mean().backward()
            model.share_buffers()

    @pytest.mark.parametrize("zeroes", [False, True])
    def test_a_constant_batch_is_divided_once(self, zeroes: bool) -> None:
        """A quarter of the sum over two groups is half of what both hold already."""
        with peers() as agent:
            agent.world_size = WorldSize(WorldSizeMode.CONSTANT_BATCH, 4)
            model: Any = ours(Tower(), agent)
            backward(model, 0, 0)
            if zeroes:
                model.zero_grad(set_to_none=False)
            loss = model(images(1, 0)).square().mean()
            with nullcontext() if zeroes else pytest.raises(ConfigurationError, match="all passes but the step's last"):
                loss.backward()


def test_a_copy_of_it_would_have_no_agent() -> None:
    with peers() as agent, pytest.raises(TypeError, match="the model that it wraps"):
        copy.deepcopy(ours(Tower(), agent))


def test_who_skips_a_batch_takes_the_mean_in_the_memory_order_of_its_parameters() -> None:
    """A bucket holds each gradient in that order, so another one would move the groups apart."""
    with peers() as agent, peers() as skipping_agent:
        model, skipping = ours(strided(), agent), ours(strided(), skipping_agent)
        model(torch.randn(2, 3, 4, 4)).square().mean().backward()
        skipping_agent.meet(agent.seen)
        assert skipping.contribute_zeros()
        for one, other in zip(gradients(model), gradients(skipping), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one / 2, other)


def embedding() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.EmbeddingBag(20, 8, sparse=True), torch.nn.Linear(8, 2))


def test_who_skips_a_batch_takes_the_mean_of_a_sparse_gradient() -> None:
    """torch knows its layout from the first backward pass on: before that, the step cannot be done."""
    with peers() as agent, peers() as skipping_agent:
        model: Any = ours(embedding(), agent)
        skipping: Any = ours(embedding(), skipping_agent)
        assert not skipping.contribute_zeros()
        for each in (model, skipping):
            each.zero_grad()
            each(torch.tensor([[1, 2], [2, 3]])).square().mean().backward()
        skipping.zero_grad()
        skipping_agent.meet(agent.seen)
        assert skipping.contribute_zeros()
        for one, other in zip(gradients(model), gradients(skipping), strict=True):
            assert one is not None
            assert other is not None
            assert one.layout is other.layout
            assert torch.equal(one.to_dense() / 2, other.to_dense())


def test_who_skips_a_batch_reduces_the_same_map_whatever_the_default_dtype() -> None:
    with peers() as agent, peers() as skipping_agent:
        model: Any = ours(Branches(), agent, **FIND_UNUSED)
        skipping: Any = ours(Branches(), skipping_agent, **FIND_UNUSED)
        backward(model, 0, 0, 0)
        torch.set_default_dtype(torch.float64)
        try:
            assert skipping.contribute_zeros()
        finally:
            torch.set_default_dtype(torch.float32)
        assert [each.dtype for each in skipping_agent.seen] == [each.dtype for each in agent.seen]


def test_an_error_of_the_agent_ends_the_backward_pass() -> None:
    with peers() as agent:
        model = ours(Tower(), agent)
        agent.meet([])  # a peer without buckets: all_reduce fails
        with pytest.raises(RuntimeError, match="list index out of range"):
            backward(model, 0, 0)


def test_a_bucket_has_the_same_name_whether_its_module_is_compiled_or_not() -> None:
    """Groups compare the names: one may come back compiled."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    compiled: Any = torch.compile(model[1])
    assert _name_in(model, compiled) == _name_in(model, model[1]) == "1"
