"""torchtitan with torchft on Lighthouse: python -m agent_client.integrations.torchtitan ARGUMENTS...

    torchrun --nproc_per_node=4 -m agent_client.integrations.torchtitan --job.config_file llama3_8b.toml \\
        --fault_tolerance.enable --fault_tolerance.group_size=2 --fault_tolerance.replica_id=0

It runs the trainer of the installed torchtitan that uses torchft, and refuses one that would train alone. A group that
heals gets the present learning rate of its source; torchtitan itself would serve that of the first step.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from agent_client.torchft.__main__ import run_module

TRAINERS = ("torchtitan.experiments.ft.train", "torchtitan.train")
"""Of 0.2.2 and before; and of 0.3.0, where `--module torchft.llama3` chooses it."""
CONTAINERS = (
    ("torchtitan.components.optimizer", "FTOptimizersContainer"),
    ("torchtitan.experiments.torchft.optimizer", "TorchFTOptimizersContainer"),
)


def exists(name: str) -> bool:
    """Whether there is such a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def trainer() -> str:
    """The module to run. Raises SystemExit without torchtitan."""
    found = next((name for name in TRAINERS if exists(name)), None)
    if found is None:
        raise SystemExit("torchtitan is not installed: pip install torchtitan")
    return found


def mend() -> None:
    """An optimizer's state is served with its present hyperparameters, and not with those of its first step.

    It is asked for on a thread of torchft's while the forward pass of FSDP puts other parameters into the modules, so
    it cannot be collected anew there. Its tensors are the optimizer's own.
    """
    for module, name in CONTAINERS:
        container: Any = getattr(importlib.import_module(module), name, None) if exists(module) else None
        if container is not None:
            container.state_dict = serving_present(container.state_dict)


def serving_present(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Of a container, whose optimizers all have one parameter group and the same hyperparameters."""

    def present(container: Any) -> dict[str, Any]:
        [group] = container.optimizers[0].param_groups
        moved = {name: value for name, value in group.items() if isinstance(value, float | torch.Tensor)}
        return {
            key: moved.get(key.rpartition(".")[2], value) if key.startswith("param_groups.") else value
            for key, value in state_dict(container).items()
        }

    return present


def main() -> None:
    run_module(trainer(), before=mend)


if __name__ == "__main__":
    main()
