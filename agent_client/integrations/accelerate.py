"""Integration with Hugging Face Accelerate: an Accelerator whose steps all replica groups commit or discard together.

Training loops work unchanged. They may call `accumulate()`, `backward()`, `clip_grad_norm_()`, `step()` and
`zero_grad()` in any order.
"""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from agent_client.errors import ConfigurationError
from agent_client.integrations.library import library, train_state_entries
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.config import AgentOptions
from agent_client.step.rules.world_size import WorldSizeMode
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from agent_client.training.sampler import Drawn
from agent_client.training.step_loader import StepLoader

with library("accelerate", "accelerate>=1.15"):
    from accelerate import Accelerator
    from accelerate.utils import send_to_device


class FaultTolerantAccelerator(Accelerator):
    """Accelerator for replica groups. `prepare` creates the Agent, and the optimizer votes on each step.

    Example:
        ```python
        from agent_client.integrations.accelerate import FaultTolerantAccelerator

        accelerator = FaultTolerantAccelerator(max_steps=1000)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:  # ends after 1000 committed steps
            ...
        ```
    """

    def __init__(
        self,
        *args: Any,
        max_steps: int | None = None,
        agent_options: AgentOptions | None = None,
        ddp_options: dict[str, Any] | None = None,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """Set the options.

        Args:
            *args: Positional arguments for the Accelerator.
            max_steps: Number of committed steps after which the training batches end. If None, they never end.
            agent_options: Options for `Agent.from_env`.
            ddp_options: Options for `agent_client.DistributedDataParallel`.
            data_seed: Seed for the order of the batches.
            **kwargs: Keyword arguments for the Accelerator.
        """
        super().__init__(*args, **kwargs)
        self.agent: Agent | None = None
        self._max_steps = max_steps
        self._agent_options = agent_options or {}
        self._ddp_options = ddp_options or {}
        self._data_seed = data_seed
        self.drawn: Drawn | None = None
        """Batch for which the loop has not called `accumulate()` yet, or None."""
        self._is_last = True

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare a model and its optimizer, together with schedulers and loaders, and create the Agent.

        A call without an optimizer prepares the objects as the base class does.

        Args:
            *args: Objects to prepare. The first loader is the training loader. A step always gets the same batches
                from it, also after a restart.
            device_placement: Passed to the base class.

        Returns:
            The prepared objects, in the same order.

        Raises:
            ConfigurationError: There are several models or optimizers, or an optimizer was already prepared.
        """
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if len(models) != 1 or len(optimizers) != 1 or self.agent is not None:
            raise ConfigurationError(
                f"prepare() received {len(models)} models and {len(optimizers)} optimizers; pass one of each in one "
                "call, or create the Agent yourself (docs/how-to/several-optimizers.md)"
            )
        [model], [inner] = models, optimizers
        schedulers = [each for each in args if isinstance(each, LRScheduler)]
        if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
            raise ConfigurationError("ReduceLROnPlateau needs a metric, which differs by group; use another scheduler")
        prepared = self.prepare_model(model, evaluation_mode=True)
        state = TrainState(model, inner, **train_state_entries(self.scaler, schedulers))
        self.agent = agent = Agent.from_env(state=state, **self._agent_options)
        self.register_for_checkpointing(agent)
        replicated = DistributedDataParallel(prepared, agent, **self._ddp_options)
        optimizer = super().prepare(FaultTolerantOptimizer(inner, agent))
        training = next((each for each in args if isinstance(each, DataLoader)), None)

        def one(each: Any) -> Any:
            if each is model:
                return replicated
            if each is inner:
                return optimizer
            if each is training:
                accumulate, steps = self.gradient_accumulation_steps, self._max_steps
                by_step = StepLoader.of(each, agent, accumulate=accumulate, steps=steps, seed=self._data_seed)
                return _OnDevice(by_step, self, None if steps is None else steps * accumulate)
            return super(FaultTolerantAccelerator, self).prepare(
                FaultTolerantScheduler(each, agent) if isinstance(each, LRScheduler) else each
            )

        return tuple(one(each) for each in args)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Generator[None]:
        """Disable gradient reduction within the context, even if the replica group is a single process."""
        with model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model):
            yield

    def _do_sync(self) -> None:
        """Synchronize gradients only in this rank's last batch of a step. `accumulate()` calls this."""
        super()._do_sync()
        if self.drawn is not None:
            self._is_last, self.drawn = self.drawn.is_last, None
        if self.agent is not None:
            self.gradient_state._set_sync_gradients(self._is_last)


class _OnDevice:
    """The training batches, moved to this rank's device. len() assumes that no step is discarded."""

    def __init__(self, loader: StepLoader, accelerator: FaultTolerantAccelerator, length: int | None) -> None:
        self._loader, self._accelerator, self._length = loader, accelerator, length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the training loop has no end: pass max_steps to FaultTolerantAccelerator")
        return self._length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        for drawn, batch in self._loader.drawn(several=True):
            accelerator.drawn = drawn
            yield send_to_device(batch, accelerator.device)
            if (
                accelerator.drawn is drawn
                and accelerator.agent.internals.machine.world_size.mode is WorldSizeMode.CONSTANT_BATCH
            ):
                raise ConfigurationError(
                    "constant_batch: a step may have several batches; put the body of the loop inside "
                    "`with accelerator.accumulate(model):`"
                )
