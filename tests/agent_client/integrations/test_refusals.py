"""What cannot be trained fault tolerantly is refused before an Agent is made, and the error says what to do instead."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from agent_client.errors import ConfigurationError
from agent_client.integrations.library import check_max_steps
from tests.agent_client.integrations.libraries import require

DATA = TensorDataset(torch.zeros(8, 3))


def model_and_optimizers() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    model = torch.nn.Linear(3, 2)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    name = f"agent_client.integrations.{library}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [each for each in sys.modules if each.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"^{library} is not installed: pip install '{library}>="):
        importlib.import_module(name)


def test_torchtitan_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torchtitan = importlib.import_module("agent_client.integrations.torchtitan")
    monkeypatch.setattr(torchtitan, "exists", lambda name: False)
    with pytest.raises(SystemExit, match="torchtitan is not installed: pip install torchtitan"):
        torchtitan.main()


@pytest.mark.parametrize("steps", [-1, 0])
def test_a_training_without_a_number_of_steps(steps: int) -> None:
    with pytest.raises(ConfigurationError, match="max_steps: give the number of steps to commit"):
        check_max_steps(steps)


def test_what_transformers_asks_for(tmp_path: Path) -> None:
    require("transformers")
    transformers, ours = map(importlib.import_module, ("transformers", "agent_client.integrations.transformers"))
    args = transformers.TrainingArguments(output_dir=str(tmp_path), num_train_epochs=2, use_cpu=True, report_to="none")
    with pytest.raises(ConfigurationError, match="max_steps: give the number of steps"):
        ours.FaultTolerantTrainer(model=torch.nn.Linear(3, 2), args=args, train_dataset=DATA)


def test_what_accelerate_is_given() -> None:
    require("accelerate")
    ours = importlib.import_module("agent_client.integrations.accelerate")
    model, [first, second] = model_and_optimizers()
    accelerator = ours.FaultTolerantAccelerator(cpu=True, max_steps=10)
    for given, counts in (((first,), "0 models and 1"), ((model, first, second), "1 models and 2")):
        with pytest.raises(ConfigurationError, match=f"{counts} optimizers; pass one of each.*create the Agent"):
            accelerator.prepare(*given)
    by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(first)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau .*; use another scheduler"):
        accelerator.prepare(model, first, by_metric)


@pytest.mark.filterwarnings("ignore")  # Lightning's own: srun is installed and not used, few workers
@pytest.mark.parametrize(
    ("interval", "optimizers", "steps", "remedy"),
    [
        ("step", 1, -1, "max_steps: give the number of steps"),
        ("step", 2, 10, "create the Agent in configure_optimizers"),
        ("epoch", 1, 10, '"interval": "step"'),
    ],
)
def test_what_lightning_is_given(interval: str, optimizers: int, steps: int, remedy: str) -> None:
    require("lightning")
    lightning, ours = map(importlib.import_module, ("lightning", "agent_client.integrations.lightning"))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = model_and_optimizers()
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: Any, number: int) -> Any:
            raise AssertionError("it trains")

        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(optimizers)]
            decay = torch.optim.lr_scheduler.ExponentialLR(made[0], 0.9)
            return made, [{"scheduler": decay, "interval": interval}]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ours.FaultTolerantStrategy("cpu")
    trainer = lightning.Trainer(strategy=strategy, max_steps=steps, enable_model_summary=False, **quiet)
    with pytest.raises(ConfigurationError, match=remedy):
        trainer.fit(Module(), DataLoader(DATA))
    assert strategy.agent is None
