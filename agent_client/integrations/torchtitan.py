"""torchtitan with torchft, on our control plane: python -m agent_client.integrations.torchtitan ARGUMENTS...

    torchrun --nproc_per_node=4 -m agent_client.integrations.torchtitan --job.config_file llama3_8b.toml \\
        --fault_tolerance.enable --fault_tolerance.group_size=2 --fault_tolerance.replica_id=0

It runs the trainer of the installed torchtitan that trains with torchft, and refuses one that would train alone. A
group that heals takes over the learning rate of its source: torchtitan's own state is the one of its first step.
"""

import importlib
import importlib.util
from typing import Any

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
    """An optimizer's state is served as it is now, and not with the hyperparameters of its first step."""
    for module, name in CONTAINERS:
        container: Any = getattr(importlib.import_module(module), name, None) if exists(module) else None
        if container is not None:
            base: Any = container.__mro__[1]
            container.state_dict = base.state_dict


def main() -> None:
    run_module(trainer(), before=mend)


if __name__ == "__main__":
    main()
