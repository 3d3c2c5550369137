"""DiLoCo against its papers' formulas, written out plainly; its schedule; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_client.training.local_sgd import DiLoCo, _balanced
from tests.agent_client.lone_agent import LoneAgent, back_propagate, inner_step, model_of, values

LR, MOMENTUM = 0.7, 0.9


def outer_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)


def diloco(
    agent: LoneAgent, seed: int = 0, make_options: Callable[[Any], dict[str, Any]] = lambda model: {}, **options: Any
) -> tuple[torch.nn.Module, DiLoCo]:
    """`make_options`: of the model."""
    model = model_of(seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_every": 3, "outer_optimizer": outer_sgd(model)} | options | make_options(model)
    return model, DiLoCo(model, inner, agent=agent, **options)  # type: ignore[arg-type]


class Plain:
    """The formulas of the papers for one parameter list, one worker and Nesterov's SGD; `halved`: a peer that stands
    still takes part in the mean."""

    def __init__(self, model: torch.nn.Module, mixing: float, factor: float) -> None:
        self.model = model
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.globals = [parameter.detach().clone() for parameter in model.parameters()]
        self.momenta: list[Tensor | None] = [None] * len(self.globals)
        self.mixing = mixing
        self.factor = factor

    def pseudo_gradients(self) -> list[Tensor]:
        pairs = zip(self.globals, self.model.parameters(), strict=True)
        return [self.factor * (old - local.detach()) for old, local in pairs]

    @torch.no_grad()
    def outer_step(self, gradients: list[Tensor], fragment: list[int]) -> None:
        parameters = list(self.model.parameters())
        for index in fragment:
            gradient, momentum = gradients[index], self.momenta[index]
            momentum = gradient.clone() if momentum is None else MOMENTUM * momentum + gradient
            self.momenta[index] = momentum
            self.globals[index] -= LR * (gradient + MOMENTUM * momentum)
            parameters[index].copy_(self.mixing * parameters[index] + (1 - self.mixing) * self.globals[index])

    @torch.no_grad()
    def go_back(self, fragment: list[int]) -> None:
        for index in fragment:
            list(self.model.parameters())[index].copy_(self.globals[index])


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([1.0, 0.5]),
    st.lists(st.booleans(), max_size=8),
)
def test_it_does_what_the_papers_say(
    count: int, interval: int, delay: int, mixing: float, factor: float, decisions: list[bool]
) -> None:
    delay = min(delay, interval - 1)
    agent = LoneAgent(*decisions, mean=lambda tensor: factor * tensor, step=1)
    model, optimizer = diloco(
        agent, sync_every=count * interval, fragments=count, delay=delay, mixing=mixing, attempts=1
    )
    plain = Plain(model_of(), mixing, factor)
    fragments = _balanced([tensor.numel() for tensor in plain.globals], count)
    outer_steps, gradients = 1, plain.pseudo_gradients()
    for number, is_committed in enumerate([*decisions, True, True]):
        fragment, agent.reduced = fragments[outer_steps % count], []
        for inner in range(interval):
            inner_step(model, optimizer, interval * number + inner)
            inner_step(plain.model, plain.inner, interval * number + inner)
            if inner + 1 == interval - delay:
                gradients = plain.pseudo_gradients()
        if is_committed:
            plain.outer_step(gradients, fragment)
        else:
            plain.go_back(fragment)
        outer_steps += is_committed
        assert (agent.current_step, len(agent.reduced)) == (outer_steps, len(fragment))
        for mine, expected in zip(model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
        for mine, expected in zip(agent.state.standing["outer"].tensors, plain.globals, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_with_a_delay_a_fragment_travels_beside_inner_steps() -> None:
    agent = LoneAgent(step=1)
    model, optimizer = diloco(agent, sync_every=5, delay=2)
    assert agent.state.stands_still is False, "what moves between quorum and vote is never read in place"
    agent.asked.clear()
    heard: list[list[str]] = []
    for number in range(5):
        inner_step(model, optimizer, number)
        heard.append(list(agent.asked))
    assert heard == [[], [], ["quorum"], ["quorum"], ["quorum", "vote"]]


def test_without_a_quorum_the_ranks_of_a_group_still_reduce_alike() -> None:
    """Those whose agent has no quorum, too: the others wait for them inside the group."""
    agent = LoneAgent(False, step=3)
    agent.has_quorum = False
    model, optimizer = diloco(agent, sync_every=2, fragments=2, attempts=1)
    assert not inner_step(model, optimizer, 0)
    assert len(agent.reduced) == len(optimizer._fragments[3 % 2])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_of_like_size_and_hold_everything_once(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    fragments = _balanced(sizes, count)
    assert sorted(index for fragment in fragments for index in fragment) == list(range(len(sizes)))
    assert len(fragments) == count
    assert all(fragments)
    totals = [sum(sizes[index] for index in fragment) for fragment in fragments]
    assert max(totals) - min(totals) <= max(sizes)


def test_fragments_can_be_modules() -> None:
    modules = lambda model: {"fragments": [model[2], model[0]]}  # noqa: E731
    _, optimizer = diloco(LoneAgent(), make_options=modules, sync_every=2)
    assert optimizer._fragments == [[2, 3], [0, 1]]


def test_what_heals_includes_the_outer_optimizer_s_state() -> None:
    source_agent, agent = LoneAgent(step=4), LoneAgent()
    model, source = diloco(source_agent, seed=1, fragments=3)
    for number in range(5):
        inner_step(model, source, number)
    diloco(agent, seed=2, fragments=3)
    mine, theirs = agent.state.standing["outer"], source_agent.state.standing["outer"]
    mine.load_state_dict(theirs.state_dict())
    assert values(mine.tensors) == values(theirs.tensors)
    momenta = [[entry["momentum_buffer"] for entry in outer.optimizer.state.values()] for outer in (mine, theirs)]
    assert values(momenta[0]) == values(momenta[1])
    assert len(momenta[0]) > 0


def used_before() -> torch.optim.Optimizer:
    model = model_of()
    outer = outer_sgd(model)
    back_propagate(model, 0)
    outer.step()
    return outer


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sync_every": 3, "fragments": 2}, "multiple of the number of fragments, 2"),
        ({"sync_every": 0}, "at least 1, not 0"),
        ({"sync_every": 4, "fragments": 2, "delay": 2}, "delay 2 at least 0 and below"),
        ({"delay": -1}, "delay -1"),
        ({"mixing": 1.5}, "mixing 1.5"),
        ({"fragments": 5}, "fragments: 5 of 4 parameters"),
        ({"fragments": 0}, "fragments: 0 of 4 parameters"),
        ({"fragments": [model_of()], "sync_every": 1}, "every parameter of the model"),
        ({"make_options": lambda model: {"fragments": [model[0], model]}, "sync_every": 2}, "exactly one"),
        ({"outer_optimizer": used_before()}, "has state already"),
        ({"outer_optimizer": outer_sgd(model_of())}, "needs all parameters of the inner one"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        diloco(LoneAgent(), **options)
