"""DiLoCo (arXiv 2311.08105) and its streaming variant (arXiv 2501.18512).

Each rank takes inner steps of its own. In an outer step the outer optimizer moves the global parameters by the mean of
the pseudo-gradients, global - local, and the local ones go on from there. Of a model in P fragments one is synchronised
at a time, each every `sync_every` inner steps: outer step n is about fragment n mod P, so the schedule heals with the
step. With `delay` the pseudo-gradients travel beside that many inner steps; with `mixing` a fragment keeps so much of
the local parameters: local = mixing * local + (1 - mixing) * global.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.optim import Optimizer

from agent_client.agent.agent import Agent
from agent_client.training.local_sgd import OuterState, OuterSteps, parameters_of


class DiLoCo(OuterSteps):
    """Optimizer with local inner steps and an outer optimizer that moves the global parameters.

    The inner optimizer moves the model in each rank. Every `sync_every` inner steps the outer optimizer moves the
    global parameters by the mean difference of all ranks. Use it like the inner optimizer; the outer one belongs to it.

    Example:
        ```python
        agent = Agent.from_env(state=TrainState(model, inner))
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        optimizer = DiLoCo(model, inner, outer, agent, sync_every=100)
        ```
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer,
        agent: Agent,
        *,
        sync_every: int,
        fragments: int | Sequence[torch.nn.Module] = 1,
        delay: int = 0,
        mixing: float = 0.0,
        attempts: int = 2,
    ) -> None:
        """Combine both optimizers. All groups use the same numbers.

        Args:
            model: The model. It is not wrapped in DistributedDataParallel.
            inner_optimizer: Moves the model's parameters in each inner step.
            outer_optimizer: Moves the global parameters. It is given the model's parameters and has no state yet.
            agent: The Agent of this rank.
            sync_every: Number of inner steps between two synchronizations of a fragment.
            fragments: Number of fragments of similar size, or the modules that make them up. One fragment is
                synchronized at a time. `sync_every` is a multiple of their number.
            delay: Number of inner steps that overlap with the communication.
            mixing: Share of the local parameters that a fragment keeps, from 0 to 1.
            attempts: Number of attempts at an outer step. After them its inner steps are lost.

        Raises:
            ValueError: The arguments do not fit together.
            ConfigurationError: The Agent has `heal_mode="catch_up"`.
        """
        parameters = list(model.parameters())
        self._fragments = _split(parameters, fragments)
        interval, rest = divmod(sync_every, len(self._fragments))
        if rest or not 0 <= delay < max(1, interval) or not 0 <= mixing <= 1:
            raise ValueError(
                f"sync_every {sync_every} must be a multiple of the number of fragments, {len(self._fragments)}; "
                f"delay {delay} at least 0 and below their quotient; mixing {mixing} from 0 to 1"
            )
        state = OuterState(parameters)
        _take_over(outer_optimizer, inner_optimizer, dict(zip(parameters, state.tensors, strict=True)))
        state.optimizer = outer_optimizer
        super().__init__(inner_optimizer, agent, state, interval=interval, delay=delay, attempts=attempts)
        self._outer = outer_optimizer
        self._mixing = mixing
        self._means: dict[int, Future[Tensor]] = {}

    def _contribute(self, step: int) -> None:
        fragment = self._fragments[step % len(self._fragments)]
        local, tensors = self._state.local, self._state.tensors
        self._means = {index: self._mean(index, tensors[index] - local[index]) for index in fragment}

    def _settle(self, is_committed: bool) -> None:
        if is_committed:
            self._step_outer()
        local = self._state.local
        for index in self._means:
            if is_committed and self._mixing:
                local[index].lerp_(self._state.tensors[index], 1 - self._mixing)
            else:
                local[index].copy_(self._state.tensors[index])
        self._means = {}

    def _step_outer(self) -> None:
        """The optimizer leaves alone whatever has no gradient: the other fragments."""
        for index, mean in self._means.items():
            self._state.tensors[index].grad = mean.result()
        self._outer.step()
        self._outer.zero_grad()


def _split(parameters: Sequence[Tensor], fragments: int | Sequence[torch.nn.Module]) -> list[list[int]]:
    """The indices of each fragment's parameters."""
    if isinstance(fragments, int):
        return _balanced([parameter.numel() for parameter in parameters], fragments)
    places = {parameter: index for index, parameter in enumerate(parameters)}
    found = [[places[parameter] for parameter in module.parameters() if parameter in places] for module in fragments]
    if sorted(index for fragment in found for index in fragment) != list(range(len(parameters))) or not all(found):
        raise ValueError("fragments: every parameter of the model must be in exactly one of them, and none be empty")
    return found


def _balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The largest first, each to the fragment that is the smallest so far."""
    if not 1 <= count <= len(sizes):
        raise ValueError(f"fragments: {count} of {len(sizes)} parameters")
    found: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        smallest = min(range(count), key=lambda number: (totals[number], len(found[number])))
        found[smallest].append(index)
        totals[smallest] += sizes[index]
    return [sorted(fragment) for fragment in found]


def _take_over(outer: Optimizer, inner: Optimizer, tensors: dict[Tensor, Tensor]) -> None:
    """Let the outer optimizer work on the global parameters."""
    if outer.state:
        raise ValueError("outer_optimizer: has state already; restore it by the Agent's checkpoint")
    if not parameters_of(inner) <= parameters_of(outer) <= tensors.keys():
        raise ValueError("outer_optimizer: needs all that the inner one moves, and parameters of the model only")
    for group in outer.param_groups:
        group["params"] = [tensors[parameter] for parameter in group["params"]]
