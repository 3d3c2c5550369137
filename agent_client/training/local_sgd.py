"""LocalSGD (arXiv 1805.09767), DiLoCo (arXiv 2311.08105) and its streaming variant (arXiv 2501.18512).

Each rank takes local (inner) steps without communication. After `sync_every` inner steps, an outer step synchronizes
all ranks. An outer step is a step of the Agent, so either all ranks commit it or none does. Its quorum is requested
when the outer step begins, and so includes groups that have joined since the last outer step. The global parameters are
those of the last committed outer step. They are equal in all groups, and a healing group copies them.

LocalSGD averages the parameters. In DiLoCo, an outer optimizer updates the global parameters with the mean of the
pseudo-gradients (global - local), and the local parameters continue from the global ones. If the model is divided into
P fragments, they are synchronized one at a time, each of them every `sync_every` inner steps. Outer step n
synchronizes fragment n mod P, so a healed group continues with the right fragment. With `delay`, the communication
overlaps with that number of inner steps. With `mixing`, a fragment keeps a share of the local parameters: local =
mixing * local + (1 - mixing) * global.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agent_client.state.shards import is_sharded, local_part
from agent_client.state.train_state import load_uncast
from agent_client.step.agent import Agent
from agent_client.step.rules.comparison import DataChoice
from agent_client.step.rules.world_size import WorldSizeMode
from agent_client.training.optimizer import FaultTolerantOptimizer

STATE_NAME = "outer"


class OuterState:
    """State that a healing group copies: global parameters, outer optimizer, and counts of inner steps and batches.

    Inner steps change only the local parameters. If the model is sharded, each rank stores its own shards.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.tensors = [tensor.clone() for tensor in self.local]
        self.optimizer: Optimizer | None = None
        self.inner_steps = 0
        self.rank_batches = 0
        """Number of batches in the committed outer steps, summed over all ranks in all groups."""

    @property
    def local(self) -> list[Tensor]:
        return [local_part(parameter.detach()) for parameter in self.parameters]

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict() if self.optimizer else {}
        counts = {"inner_steps": self.inner_steps, "rank_batches": self.rank_batches}
        return {"parameters": self.tensors, "optimizer": optimizer, **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for tensor, received in zip(self.tensors, state_dict["parameters"], strict=True):
            tensor.copy_(received)
        if self.optimizer is not None:
            load_uncast(self.optimizer, state_dict["optimizer"])
        self.inner_steps, self.rank_batches = state_dict["inner_steps"], state_dict["rank_batches"]


@dataclass(slots=True)
class InnerSteps:
    """Stand-in for `Agent.internals` in a StepSampler that counts inner steps."""

    agent: Agent
    taken: int = 0
    ranks: int = 1

    def draw_counts(self) -> tuple[int, int, bool]:
        return self.taken, self.taken, False

    def record_source(self, data: DataChoice) -> None:
        self.agent.internals.record_source(data, is_whole_step=False)

    def record_draw(self, sampler: object, number: int, batch: Callable[[], Tensor]) -> bool:
        return True


class OuterSteps(FaultTolerantOptimizer):
    """Base class of LocalSGD and DiLoCo: an optimizer with inner and outer steps.

    zero_grad() and step() call the inner optimizer, and every `interval`-th step() ends an outer step. An outer step
    begins `delay` inner steps before its end, and its communication overlaps with these. A discarded outer step is
    retried immediately. After `attempts` failed attempts, its inner steps are lost, and the script repeats them.

    If an object of this class is the `position` of a StepSampler, the sampler counts inner steps.
    """

    votes_each_step = False

    def __init__(
        self, optimizer: Optimizer, agent: Agent, state: OuterState, *, interval: int, delay: int, attempts: int
    ) -> None:
        agent.internals.refuse_catch_up("LocalSGD or DiLoCo, whose outer steps do not average gradients")
        super().__init__(optimizer, agent)
        if interval < 1 or attempts < 1:
            raise ValueError(f"sync_every and attempts must be at least 1, not {interval} and {attempts}")
        if agent.internals.machine.world_size.mode is WorldSizeMode.CONSTANT_BATCH:
            raise ValueError(
                "world_size_mode: constant_batch distributes the microbatches of a step; local steps have none"
            )
        if agent.state.standing.setdefault(STATE_NAME, state) is not state:
            raise ValueError(f"the TrainState holds another {STATE_NAME!r}; use one LocalSGD or DiLoCo per Agent")
        if not parameters_of(optimizer) <= set(state.parameters):
            raise ValueError("optimizer: updates parameters outside the model, which would not be synchronized")
        agent.internals.request_late()
        agent.state.stands_still = delay == 0
        self._state = state
        self._interval = interval
        self._delay = delay
        self._attempts = attempts
        self._is_under_way = False
        self.internals = InnerSteps(agent)

    @property
    def global_parameters(self) -> list[Tensor]:
        """Parameters of the last committed outer step, equal in all groups, in the order of model.parameters().

        If the model is sharded, these are this rank's shards.
        """
        return list(self._state.tensors)

    @property
    def current_step(self) -> int:
        """Number of inner steps in all committed outer steps, plus the inner steps since then."""
        counted = max(0, self._agent.current_step - 1)  # the first one, in which the ranks join, has no inner steps
        return counted * self._interval + self._state.inner_steps

    @property
    def batches_committed(self) -> int:
        """Number of batches in all inner steps before the current one, summed over all ranks."""
        _, places = self._agent.internals.last_slot()
        return self._state.rank_batches + self._state.inner_steps * places

    def slot(self) -> tuple[int, int]:
        """Return this rank's index among all ranks of the last outer step's quorum, and the number of these ranks."""
        self._join()
        self._agent.internals.last_slot()  # waits for the first quorum, in which a resumed rank may heal
        self._join()
        return self._agent.internals.last_slot()

    def slots(self) -> list[tuple[int, int]]:
        return [self.slot()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._join()
        self.wrapped.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> bool:
        """Take an inner step, and end the outer step if this was its last inner step.

        The script must call this optimizer's `zero_grad` before its first inner step. That call connects this rank to
        the other groups, and heals it if necessary.

        Returns:
            False if this call ended an outer step that was discarded, otherwise True. A discarded outer step resets the
            parameters to those of the last committed one. If the model is divided into fragments, only the fragment of
            the discarded outer step is reset.
        """
        self.wrapped.step(closure)
        self._state.inner_steps += 1
        self.internals.taken += 1
        if self._state.inner_steps == self._interval - self._delay:
            self._begin_outer_step()
        return self._state.inner_steps < self._interval or self._end_outer_step()

    def _join(self) -> None:
        """Prepare for the next inner step.

        Before the first one, run an outer step without inner steps, in which this rank heals if necessary. If the state
        was copied or saved while an outer step was in progress, begin that outer step again, and end it if all of its
        inner steps were taken.
        """
        while self._agent.current_step == 0:
            self._begin_outer_step()
            self._end_outer_step()
        if self._state.inner_steps >= self._interval - self._delay and not self._is_under_way:
            self._begin_outer_step()
            if self._state.inner_steps >= self._interval:
                self._end_outer_step()

    def _begin_outer_step(self) -> None:
        """Begin an outer step. Wait for its quorum, because a healing peer must receive the current state."""
        self._agent.start_quorum()
        step = self._agent.quorum_step
        self._contribute(self._agent.current_step if step is None else step)
        self._is_under_way = True

    @torch.no_grad()
    def _end_outer_step(self) -> bool:
        before = self._agent.batches_committed
        is_committed = self._agent.should_commit()
        for _ in range(1, self._attempts):
            if is_committed:
                break
            self._begin_outer_step()
            before = self._agent.batches_committed
            is_committed = self._agent.should_commit()
        if is_committed and self._state.inner_steps:
            self._state.rank_batches += (
                (self._agent.batches_committed - before) * self._agent.group_world_size * self._interval
            )
        with self._agent.applying() if is_committed else nullcontext():
            self._update_parameters(is_committed)
        self._state.inner_steps, self._is_under_way = 0, False
        self._agent.internals.call_on_commit()
        return is_committed

    def _mean(self, index: int, tensor: Tensor) -> "Future[Tensor]":
        within_group = not is_sharded(self._state.parameters[index])
        return self._agent.all_reduce(tensor, within_group=within_group, name=f"parameter {index}")

    def _contribute(self, step: int) -> None:
        raise NotImplementedError

    def _update_parameters(self, is_committed: bool) -> None:
        """Update the global parameters if the outer step was committed. Then set the local parameters from them."""
        raise NotImplementedError


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


class LocalSGD(OuterSteps):
    """Optimizer that averages the parameters of all groups every `sync_every` steps.

    Between two averages, the groups do not communicate. Use this class like the optimizer that it wraps. Each average
    is an outer step, which is committed in all groups or in none. The optimizer keeps one copy of the parameters, and
    a second copy during an outer step. The groups reach an outer step at different times, so set the Agent's
    timeouts to more than this difference.

    Example:
        ```python
        agent = Agent.from_env(state=TrainState(model, sgd))
        optimizer = LocalSGD(model, sgd, agent, sync_every=100)
        for batch in StepSampler(len(labels), 64, optimizer):
            ...
        ```
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, agent: Agent, *, sync_every: int, attempts: int = 2
    ) -> None:
        """Wrap the optimizer.

        Args:
            model: The model. It must not be wrapped in DistributedDataParallel. All its parameters are averaged, even
                frozen ones, because a script may change them itself. To average and copy only some of them, such as
                adapters in a frozen model, pass `nn.ParameterList(parameters)`.
            optimizer: The torch optimizer for the inner steps.
            agent: The Agent of this rank.
            sync_every: Number of inner steps per outer step. It must be the same in all groups.
            attempts: Number of attempts at an outer step. If all are discarded, the step's inner steps are lost.

        Raises:
            ValueError: `sync_every` or `attempts` is less than 1, or `optimizer` has parameters that `model` lacks.
            ConfigurationError: The Agent has `heal_mode="catch_up"`.
        """
        state = OuterState(model.parameters())
        super().__init__(optimizer, agent, state, interval=sync_every, delay=0, attempts=attempts)
        self._means: list[Future[Tensor]] = []

    def _contribute(self, step: int) -> None:
        self._means = [self._mean(index, tensor.clone()) for index, tensor in enumerate(self._state.local)]

    def _update_parameters(self, is_committed: bool) -> None:
        state = self._state
        if is_committed:
            for tensor, mean in zip(state.tensors, self._means, strict=True):
                tensor.copy_(mean.result())
        for parameter, tensor in zip(state.local, state.tensors, strict=True):
            parameter.copy_(tensor)
        self._means = []


class DiLoCo(OuterSteps):
    """Optimizer with local inner steps and an outer optimizer that updates the global parameters.

    The inner optimizer updates the model on each rank. Every `sync_every` inner steps, the outer optimizer updates the
    global parameters with the mean of all ranks' pseudo-gradients (global - local). Use this class like the inner
    optimizer. It calls the outer optimizer itself.

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
        """Combine both optimizers. The numeric arguments must be the same in all groups.

        Args:
            model: The model. It must not be wrapped in DistributedDataParallel. All its parameters are averaged, even
                frozen ones, because a script may change them itself. To average and copy only some of them, such as
                adapters in a frozen model, pass `nn.ParameterList(parameters)`.
            inner_optimizer: Optimizer that updates the model's parameters in each inner step.
            outer_optimizer: Optimizer that updates the global parameters. Create it with the model's parameters. It
                must not have a state yet.
            agent: The Agent of this rank.
            sync_every: Number of inner steps between two synchronizations of a fragment.
            fragments: Number of fragments of similar size, or a list with the module of each fragment. One fragment is
                synchronized at a time. `sync_every` must be a multiple of the number of fragments.
            delay: Number of inner steps that overlap with the communication.
            mixing: Weight of a fragment's local parameters when they are mixed with its global ones, from 0 (use only
                the global ones) to 1.
            attempts: Number of attempts at an outer step. If all are discarded, the step's inner steps are lost.

        Raises:
            ValueError: A number is out of its range, the fragments do not cover the model exactly once, or an optimizer
                has the wrong parameters.
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
        tensors = dict(zip(parameters, state.tensors, strict=True))
        if outer_optimizer.state:
            raise ValueError("outer_optimizer: has state already; restore it by the Agent's checkpoint")
        if not parameters_of(inner_optimizer) <= parameters_of(outer_optimizer) <= tensors.keys():
            raise ValueError("outer_optimizer: needs all parameters of the inner one, and only parameters of the model")
        for group in outer_optimizer.param_groups:  # make it update the global parameters
            group["params"] = [tensors[parameter] for parameter in group["params"]]
        state.optimizer = outer_optimizer
        super().__init__(inner_optimizer, agent, state, interval=interval, delay=delay, attempts=attempts)
        self._outer = outer_optimizer
        self._mixing = mixing
        self._means: dict[int, Future[Tensor]] = {}

    def _contribute(self, step: int) -> None:
        fragment = self._fragments[step % len(self._fragments)]
        local, tensors = self._state.local, self._state.tensors
        self._means = {index: self._mean(index, tensors[index] - local[index]) for index in fragment}

    def _update_parameters(self, is_committed: bool) -> None:
        if is_committed:
            for index, mean in self._means.items():
                self._state.tensors[index].grad = mean.result()
            self._outer.step()  # skips the parameters of other fragments, because they have no gradients
            self._outer.zero_grad()
        local = self._state.local
        for index in self._means:
            if is_committed and self._mixing:
                local[index].lerp_(self._state.tensors[index], 1 - self._mixing)
            else:
                local[index].copy_(self._state.tensors[index])
        self._means = {}


def _split(parameters: Sequence[Tensor], fragments: int | Sequence[torch.nn.Module]) -> list[list[int]]:
    if isinstance(fragments, int):
        return _balanced([parameter.numel() for parameter in parameters], fragments)
    places = {parameter: index for index, parameter in enumerate(parameters)}
    found = [[places[parameter] for parameter in module.parameters() if parameter in places] for module in fragments]
    if sorted(index for fragment in found for index in fragment) != list(range(len(parameters))) or not all(found):
        raise ValueError("fragments: every parameter of the model must be in exactly one of them, and none be empty")
    return found


def _balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameters of the given `sizes` into `count` fragments. Return the indices of each fragment's parameters.

    Each parameter, largest first, is assigned to the fragment that is smallest so far.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"fragments: {count} of {len(sizes)} parameters")
    found: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        smallest = min(range(count), key=lambda number: (totals[number], len(found[number])))
        found[smallest].append(index)
        totals[smallest] += sizes[index]
    return [sorted(fragment) for fragment in found]
