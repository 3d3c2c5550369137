"""Integration with Hugging Face transformers: a Trainer whose steps all replica groups commit or discard together.

The Agent's counts replace the Trainer's: `state.global_step` is the number of committed steps, and an epoch ends
when all groups together have trained on every sample. So all groups log, save, evaluate and finish at the same
step. A healing group also receives the other counts of the Trainer and its callbacks, such as the best metric and
the patience of early stopping. A StepLoader selects the batches of each step. Each group needs its own
`output_dir` for its checkpoints.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from agent_client.integrations.library import check_max_steps, epochs_of, library, train_state_entries
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.config import AgentOptions
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from agent_client.training.step_loader import StepLoader

with library("transformers", "transformers>=5"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerControl

log = logging.getLogger(__name__)

AGENT_FILE = "lighthouse_agent.json"
"""File in a checkpoint with the Agent's state. The Agent's state identifies the saved model state."""
HEALING_FIELDS = ("best_metric", "best_global_step", "num_input_tokens_seen", "total_flos")
"""Fields of TrainerState that a healing group receives, in addition to the log and the best checkpoint."""


class FaultTolerance:
    """Mixin that makes any subclass of Trainer fault-tolerant. List it first among the base classes.

    Example:
        ```python
        class MyTrainer(FaultTolerance, Seq2SeqTrainer):
            pass
        ```
    """

    agent: Agent | None = None
    """The Agent, or None before the first `train()`."""

    def __init__(self, *args: Any, agent_options: AgentOptions | None = None, **kwargs: Any) -> None:
        """Set the options.

        Args:
            *args: Positional arguments for the Trainer.
            agent_options: Options for `Agent.from_env`.
            **kwargs: Keyword arguments for the Trainer.

        Raises:
            ConfigurationError: `max_steps` is not set. It is required because the number of steps in an epoch
                varies with the number of groups.
        """
        super().__init__(*args, **kwargs)
        self._agent_options = agent_options or {}
        check_max_steps(self.args.max_steps)
        self.args.ignore_data_skip = True  # the batches of a step do not depend on earlier batches
        self.callback_handler.callbacks.insert(0, _Counts(self))

    def make_agent(self) -> Agent:
        """Return the Agent, creating it if necessary. Use this to call `on_commit` before `train()`, for example."""
        self.create_optimizer()
        return self.agent

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer and, on the first call, the Agent."""
        inner = super().create_optimizer(model)
        if self.agent is None:
            others = train_state_entries(self.accelerator.scaler) | {"trainer": _Progress(self)}
            state = TrainState(self.model, inner, **others)
            self.agent = Agent.from_env(state=state, **self._agent_options)
            self.optimizer = FaultTolerantOptimizer(inner, self.agent)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create a scheduler that advances with committed steps, and add it to the state that healing groups copy."""
        inner = super().create_scheduler(num_training_steps, optimizer)
        if not isinstance(inner, FaultTolerantScheduler):
            self.agent.state.others["scheduler"] = inner
            self.lr_scheduler = FaultTolerantScheduler(inner, self.agent)
        return self.lr_scheduler

    def get_train_dataloader(self) -> Any:
        """Return a StepLoader with the Trainer's data set, collator and workers."""
        plain = super().get_train_dataloader()
        self.create_optimizer()
        loader = StepLoader.of(
            plain,
            self.agent,
            batch_size=self._train_batch_size,
            accumulate=self.args.gradient_accumulation_steps,
            steps=self.args.max_steps,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        return _Microbatches(loader)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of a step, and the mean number of items (labels that count in the loss) per group.

        Dividing by this mean normalizes the loss as if a single process had all batches.
        """
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        if number is not None and self.args.average_tokens_across_devices:
            mean = torch.as_tensor(number, dtype=torch.float64, device=device).reshape(1).clone()
            mean = self.agent.all_reduce(mean, name="number of items").result()
            number = number if self.agent.has_failed else mean[0]  # a step that has failed is discarded
        return batches, number

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        batches = [batch for microbatches in batch_samples for batch in _as_list(microbatches)]
        return super()._get_num_items_in_batch(batches, device)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradients, and return the mean loss. Reduce gradients only in the last microbatch of a step.

        `inputs` is a list with one batch for each microbatch of this rank.
        """
        losses: list[torch.Tensor] = []
        microbatches = _as_list(inputs)
        for number, each in enumerate(microbatches):
            is_last = self.accelerator.sync_gradients and number == len(microbatches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                losses.append(super().training_step(model, each, *args, **kwargs))
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(super(FaultTolerance, self).floating_point_ops(each) for each in _as_list(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for each in _as_list(inputs):
            super()._track_num_input_tokens(each)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or isinstance(model, DistributedDataParallel):
            return model
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # applies autocast and compilation
        unused = bool(self.args.ddp_find_unused_parameters)
        return DistributedDataParallel(prepared, self.agent, find_unused_parameters=unused)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After a committed step, log, save and evaluate if due. After a discarded step, do none of these."""
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
    """Fault-tolerant Trainer of Hugging Face transformers.

    Example:
        ```python
        from agent_client.integrations.transformers import FaultTolerantTrainer

        arguments = TrainingArguments(output_dir=f"out/{os.environ['REPLICA_GROUP_ID']}", max_steps=1000)
        trainer = FaultTolerantTrainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        ```
    """


class _Microbatches:
    """The training batches. Each item is a list with one batch for each microbatch of this rank."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        return self._loader.microbatches()


def _as_list(inputs: Any) -> list[Any]:
    return inputs if isinstance(inputs, list) else [inputs]


class _Counts(TrainerCallback):
    """Copies the Agent's step and epoch counts to the Trainer, before the other callbacks read them."""

    def __init__(self, trainer: FaultTolerance) -> None:
        self._trainer = trainer
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self._trainer
        self._begun = epochs_of(trainer.agent)
        if state.global_step != trainer.agent.current_step:  # the group has healed: reset the mean loss
            state.global_step = trainer._globalstep_last_logged = trainer.agent.current_step
            trainer._tr_loss.zero_()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_epoch_end(args, state, control)
        control.should_epoch_stop |= int(state.epoch) > int(self._begun)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step, state.epoch = self._trainer.agent.current_step, epochs_of(self._trainer.agent)


class _Progress:
    """State of the Trainer and its callbacks that a healing group receives, as JSON.

    The Trainer's log history is encoded again only when it has grown.
    """

    def __init__(self, trainer: FaultTolerance) -> None:
        self._trainer: Any = trainer
        self._logged = (-1, "[]")

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        if self._logged[0] != len(state.log_history):
            self._logged = len(state.log_history), json.dumps(state.log_history, default=float)
        fields = {name: getattr(state, name) for name in HEALING_FIELDS}
        callbacks = [[type(each).__name__, each.state()] for each in self._callbacks()]
        rest = json.dumps([fields, state.best_model_checkpoint, callbacks], default=float)
        return {"log": self._logged[1], "rest": rest}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        trainer = self._trainer
        trainer.state.log_history = json.loads(state_dict["log"])
        fields, best, callbacks = json.loads(state_dict["rest"])
        for name, value in fields.items():
            setattr(trainer.state, name, value)
        trainer.state.best_model_checkpoint = self._find_checkpoint(best)
        for callback, (name, state) in zip(self._callbacks(), callbacks, strict=False):
            if type(callback).__name__ == name:
                vars(callback).update(state["attributes"])
        self._logged = len(trainer.state.log_history), state_dict["log"]

    def replay_step(self) -> None:
        """Do nothing, because the counts need no replay while the group is catching up."""

    def _callbacks(self) -> Iterator[Any]:
        """Yield the callbacks whose state a healing group receives. TrainerControl is left out: each step sets it."""
        callbacks = self._trainer.callback_handler.callbacks
        return (
            each for each in callbacks if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        )

    def _find_checkpoint(self, best: str | None) -> str | None:
        """Return the path of the checkpoint `best` in this group's output folder, else `best`, or None if missing."""
        if best is None:
            return None
        places = [Path(self._trainer.args.output_dir, Path(best).name), Path(best)]
        found = next((str(place) for place in places if place.is_dir()), None)
        if found is None:
            log.warning(
                "the best model so far is in %s of the group that this one has healed from, and not in %s: "
                "load_best_model_at_end keeps the last model here, unless a better one comes; use a shared file system",
                *(best, self._trainer.args.output_dir),
            )
        return found
