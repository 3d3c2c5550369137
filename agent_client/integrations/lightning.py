"""Integration with Lightning: a strategy whose steps all replica groups commit or discard together.

`trainer.global_step` is the number of committed steps, and an epoch ends when all groups together have trained on every
sample. So all groups log, validate, save and finish at the same step. A StepLoader selects the batches of each step.
Each group writes its own checkpoints.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from agent_client.errors import ConfigurationError
from agent_client.integrations.library import check_max_steps, epochs_of, library, train_state_entries
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.config import AgentOptions
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from agent_client.training.step_loader import StepLoader

with library("lightning", "lightning>=2.6"):
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import RunningStage

AGENT_KEY = "lighthouse_agent"
"""Key of the Agent's state in a checkpoint. The Agent's state identifies the saved model state."""


class FaultTolerantStrategy(SingleDeviceStrategy):
    """Lightning strategy for replica groups. Each process is one rank with one device, as under torchrun.

    Example:
        ```python
        from agent_client.integrations.lightning import FaultTolerantStrategy

        trainer = L.Trainer(strategy=FaultTolerantStrategy(), max_steps=1000)
        trainer.fit(module, loader)
        ```
    """

    strategy_name = "lighthouse"

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        agent_options: AgentOptions | None = None,
        ddp_options: dict[str, Any] | None = None,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """Set the options.

        Args:
            device: Device of this rank. Default: the CUDA device of LOCAL_RANK, or the CPU.
            agent_options: Options for `Agent.from_env`.
            ddp_options: Options for `agent_client.DistributedDataParallel`.
            data_seed: Seed for the order of the batches.
            **kwargs: Options for Lightning's SingleDeviceStrategy.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        here = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
        super().__init__(device=device or here, **kwargs)
        self.global_rank, self.local_rank = int(os.environ.get("RANK", "0")), local_rank
        self.agent: Agent | None = None
        self._agent_options = agent_options or {}
        self._ddp_options = ddp_options or {}
        self._data_seed = data_seed
        self._others: list[Any] = []
        """This rank's microbatches of the current step, except the first one, which Lightning's own loop computes."""
        self._arguments: tuple[Any, ...] = ()

    @property
    def is_global_zero(self) -> bool:
        """True if this rank writes the logs and checkpoints of its replica group."""
        return self.global_rank == 0

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        _refuse(trainer, module, self.optimizers, self.lr_scheduler_configs)
        [inner] = self.optimizers
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        others = train_state_entries(getattr(self.precision_plugin, "scaler", None), schedulers)
        if self.agent is not None:
            self.agent.close()  # the Agent of an earlier fit()
        self.agent = agent = Agent.from_env(state=TrainState(module, inner, **others), **self._agent_options)
        self.optimizers = [FaultTolerantOptimizer(inner, agent)]
        for config in self.lr_scheduler_configs:
            config.scheduler = FaultTolerantScheduler(config.scheduler, agent)
        self.model = DistributedDataParallel(self.model, agent, **self._ddp_options)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace the training loader with a StepLoader. Return other loaders unchanged."""
        trainer = self.lightning_module.trainer
        if trainer.state.stage is not RunningStage.TRAINING:
            return dataloader
        accumulate = trainer.accumulate_grad_batches
        by_step = StepLoader.of(
            dataloader, self.agent, accumulate=accumulate, steps=trainer.max_steps, seed=self._data_seed
        )
        return _Batches(by_step, trainer, self)

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self.lightning_module.trainer
        if trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch is not None:
            trainer.val_check_batch = float("inf")  # optimizer_step() ends the epoch

    def first_of(self, microbatches: list[Any]) -> Any:
        """Return the first of a step's microbatches, which Lightning's loop runs. `backward` runs the others."""
        first, *self._others = microbatches
        return first

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a microbatch. Reduce gradients only in the last microbatch of a step."""
        is_last = not (self._others or self.lightning_module.trainer.fit_loop._should_accumulate())
        self.model.require_backward_grad_sync = is_last
        self._arguments = args[1:]
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        module, trainer = self.lightning_module, self.lightning_module.trainer
        while self._others:
            batch = trainer.precision_plugin.convert_input(self._others.pop(0))
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            named, module._current_fx_name = module._current_fx_name, "training_step"  # the training step may log
            result = self.training_step(self.batch_to_device(batch, dataloader_idx=0), *self._arguments)
            module._current_fx_name = named
            other = result["loss"] if isinstance(result, Mapping) else result
            super().backward(other / trainer.accumulate_grad_batches, *args, **kwargs)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, vote, and apply the gradients if the step is committed.

        Afterwards, set Lightning's counters to the committed steps and to the epochs that these steps cover.
        """
        begun = int(epochs_of(self.agent))
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        fit_loop = self.lightning_module.trainer.fit_loop
        loop, counted = fit_loop.epoch_loop, self.agent.current_step - 1
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = counted
        loop._batches_that_stepped = counted
        epochs = fit_loop.epoch_progress.current
        epochs.ready = epochs.started = begun + 1
        epochs.processed = epochs.completed = begun
        loop.batch_progress.is_last_batch |= int(epochs_of(self.agent)) > begun
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.agent is not None:
            checkpoint[AGENT_KEY] = self.agent.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.agent is not None and AGENT_KEY in checkpoint:
            self.agent.load_state_dict(checkpoint[AGENT_KEY])


def _refuse(trainer: Any, module: Any, optimizers: list[Any], configs: list[Any]) -> None:
    check_max_steps(trainer.max_steps)
    if len(optimizers) != 1 or not module.automatic_optimization:
        raise ConfigurationError(
            "FaultTolerantStrategy supports one optimizer with automatic optimization; otherwise create the Agent in "
            "configure_optimizers (docs/how-to/several-optimizers.md)"
        )
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval != 1.0:
        raise ConfigurationError(
            f"val_check_interval={trainer.val_check_interval}: the number of batches in an epoch changes whenever a "
            "replica group joins or leaves; give a number of batches, or 1.0"
        )
    for config in configs:
        if config.interval != "step" or config.frequency != 1 or config.reduce_on_plateau:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__}: a scheduler must step once per training step, because epochs "
                'and metrics differ between groups; return {"scheduler": scheduler, "interval": "step"}'
            )


class _Batches:
    """The training batches of all epochs. The strategy decides when an epoch ends.

    len() assumes that no step is discarded. Without len(), Lightning would prefetch a batch.
    """

    def __init__(self, loader: StepLoader, trainer: Any, strategy: FaultTolerantStrategy) -> None:
        self._loader, self._trainer, self._strategy = loader, trainer, strategy

    def __len__(self) -> int:
        return self._trainer.max_steps * self._trainer.accumulate_grad_batches

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._strategy.first_of, self._loader.microbatches())
        self._trainer.should_stop = True  # needed if the state of a peer that has finished was installed
