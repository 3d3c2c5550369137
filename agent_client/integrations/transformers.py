"""Hugging Face's Trainer, whose steps are committed or discarded by all replica groups together.

    from agent_client.integrations.transformers import FaultTolerantTrainer

    trainer = FaultTolerantTrainer(model=model, args=TrainingArguments(max_steps=1000, ...), train_dataset=data)
    trainer.train()

Counts are those of the Agent: `state.global_step` is the number of committed steps, so logs, checkpoints, evaluations
and the end come at the same step in all groups. Batches are chosen by the step (StepLoader). Each group keeps its own
checkpoints, in an `output_dir` of its own.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent_client.agent.agent import Agent
from agent_client.agent.config import AgentOptions
from agent_client.integrations.library import library
from agent_client.integrations.steps import check_max_steps, healing_beside
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from agent_client.training.scheduler import FaultTolerantScheduler
from agent_client.training.step_loader import StepLoader

with library("transformers", "transformers>=5"):
    from transformers import Trainer, TrainerCallback

AGENT_FILE = "lighthouse_agent.json"
"""In each checkpoint: what names the state that it holds."""


class FaultTolerance:
    """For any subclass of Trainer: `class MyTrainer(FaultTolerance, Seq2SeqTrainer)`."""

    agent: Agent | None = None
    """From the first `train()` on."""

    def __init__(self, *args: Any, agent_options: AgentOptions | None = None, **kwargs: Any) -> None:
        """`agent_options` are those of Agent.from_env; the others are the Trainer's.

        Raises:
            ConfigurationError: `max_steps` is not set: an epoch has another number of steps when a group comes or goes.
        """
        super().__init__(*args, **kwargs)
        self._agent_options = agent_options or {}
        check_max_steps(self.args.max_steps)
        self.args.ignore_data_skip = True  # the batches of a step do not depend on those before it
        self.callback_handler.callbacks.insert(0, _Counts(self))

    def make_agent(self) -> Agent:
        """Make the Agent before `train()` does, as for `on_commit`. Any call but the first returns the same."""
        self.create_optimizer()
        return self.agent

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the Agent, too, at the first call."""
        inner = super().create_optimizer(model)
        if self.agent is None:
            state = TrainState(self.model, inner, **healing_beside(self.accelerator.scaler))
            self.agent = Agent.from_env(state=state, **self._agent_options)
            self.optimizer = FaultTolerantOptimizer(inner, self.agent)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler moves with committed steps; its state heals."""
        inner = super().create_scheduler(num_training_steps, optimizer)
        if not isinstance(inner, FaultTolerantScheduler):
            self.agent.state.others["scheduler"] = inner
            self.lr_scheduler = FaultTolerantScheduler(inner, self.agent)
        return self.lr_scheduler

    def get_train_dataloader(self) -> Any:
        """Batches of the Trainer's own data set, collation and workers, chosen by the step."""
        plain = super().get_train_dataloader()
        self.create_optimizer()
        return StepLoader.of(
            plain,
            self.agent,
            batch_size=self._train_batch_size,
            accumulate=self.args.gradient_accumulation_steps,
            steps=self.args.max_steps,
            seed=self.args.data_seed or self.args.seed,
        )

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Reduces in the last batch of a step."""
        is_last = self.accelerator.sync_gradients
        with contextlib.nullcontext() if is_last else model.no_sync():
            return super().training_step(model, *args, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or isinstance(model, DistributedDataParallel):
            return model
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # its autocast and its compilation
        unused = bool(self.args.ddp_find_unused_parameters)
        return DistributedDataParallel(prepared, self.agent, find_unused_parameters=unused)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Not after a discarded step, whose number has been seen already."""
        if self.agent.was_committed:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        else:
            self.control.should_log = self.control.should_save = self.control.should_evaluate = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            Path(output_dir, AGENT_FILE).write_text(json.dumps(self.agent.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (file := Path(checkpoint, AGENT_FILE)).exists():
            self.agent.load_state_dict(json.loads(file.read_text()))


class FaultTolerantTrainer(FaultTolerance, Trainer):
    """The Trainer, fault tolerant."""


class _Counts(TrainerCallback):
    """First of all callbacks: the others decide by these numbers."""

    def __init__(self, trainer: FaultTolerance) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step = self._trainer.agent.current_step
        state.epoch = state.global_step / state.max_steps

    on_epoch_end: Callable[..., None] = on_step_end
