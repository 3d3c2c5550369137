r"""Run torchtitan's torchft trainer on Lighthouse.

    torchrun --nproc_per_node=4 -m agent_client.integrations.torchtitan --job.config_file llama3_8b.toml \
        --fault_tolerance.enable --fault_tolerance.group_size=2 --fault_tolerance.replica_id=0

This runs the torchft trainer of the installed torchtitan, and fails if it would train without the other groups. A
healing group receives its source's current learning rate. Unpatched, torchtitan would send that of the first step.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from agent_client.torchft.__main__ import run_module

TRAINERS = ("torchtitan.experiments.ft.train", "torchtitan.train")
"""Trainer modules of torchtitan 0.2.2 and older, and of 0.3.0, where `--module torchft.llama3` selects torchft."""
CONTAINERS = (
    ("torchtitan.components.optimizer", "FTOptimizersContainer"),
    ("torchtitan.experiments.torchft.optimizer", "TorchFTOptimizersContainer"),
)


def exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def serve_present_hyperparameters() -> None:
    """Patch torchtitan's optimizer containers so that healing groups receive the current hyperparameters.

    A container caches its state dict. The cached tensors are the optimizer's own, but the cached hyperparameters are
    the initial ones. torchft requests the state on another thread, while FSDP's forward pass replaces parameters of the
    modules, so the state dict cannot be rebuilt at that time.
    """
    for module, name in CONTAINERS:
        container: Any = getattr(importlib.import_module(module), name, None) if exists(module) else None
        if container is not None:
            container.state_dict = serving_present(container.state_dict)


def serving_present(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap the state_dict() of an optimizer container, so that its result contains the current hyperparameters.

    Each optimizer of a container has a single parameter group, and all have the same hyperparameters.
    """

    def present(container: Any) -> dict[str, Any]:
        [group] = container.optimizers[0].param_groups
        moved = {name: value for name, value in group.items() if isinstance(value, float | torch.Tensor)}
        return {
            key: moved.get(key.rpartition(".")[2], value) if key.startswith("param_groups.") else value
            for key, value in state_dict(container).items()
        }

    return present


def main() -> None:
    trainer = next(filter(exists, TRAINERS), None)
    if trainer is None:
        raise SystemExit("torchtitan is not installed: pip install torchtitan")
    run_module(trainer, before=serve_present_hyperparameters)


if __name__ == "__main__":
    main()
