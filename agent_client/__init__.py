"""Lighthouse client library for training processes.

    from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, TrainState

Importing this package does not import torch. Most names are loaded on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# gRPC reads these when it is loaded. A script's data loader forks, and for each fork gRPC would log two lines and start
# threads in the child, which sometimes abort the child (lighthouse_runtime/client/connection.py).
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from agent_client.errors import (
    AgentError,
    ConfigurationError,
    EvaluationFailed,
    EvaluationInterrupted,
    GroupDrained,
    ModelMismatch,
    RankMismatch,
    ScriptMismatch,
)
from agent_client.step.rules.world_size import WorldSizeMode

if TYPE_CHECKING:
    from agent_client.restart.rank_thread import fork_and_monitor
    from agent_client.restart.store import RestartAbort, State, StoreMixin
    from agent_client.restart.wrapper import CallWrapper, Wrapper
    from agent_client.state.train_state import TrainState
    from agent_client.step.agent import Agent, Preemption
    from agent_client.step.config import AgentConfig
    from agent_client.step.observer import observe
    from agent_client.training.checkpoint_folder import CheckpointFolder
    from agent_client.training.ddp import DistributedDataParallel
    from agent_client.training.hsdp import replicate
    from agent_client.training.local_sgd import DiLoCo, LocalSGD
    from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
    from agent_client.training.progress_push import push_progress
    from agent_client.training.sampler import StepSampler
    from agent_client.training.step_loader import StepLoader
    from lighthouse_runtime.client.clients import (
        AsyncLighthouseClient,
        AsyncManagerClient,
        LighthouseClient,
        ManagerClient,
    )

_LAZY = {
    "agent_client.restart.rank_thread": ("fork_and_monitor",),
    "agent_client.restart.store": ("RestartAbort", "State", "StoreMixin"),
    "agent_client.restart.wrapper": ("CallWrapper", "Wrapper"),
    "agent_client.state.train_state": ("TrainState",),
    "agent_client.step.agent": ("Agent", "Preemption"),
    "agent_client.step.config": ("AgentConfig",),
    "agent_client.step.observer": ("observe",),
    "agent_client.training.checkpoint_folder": ("CheckpointFolder",),
    "agent_client.training.ddp": ("DistributedDataParallel",),
    "agent_client.training.hsdp": ("replicate",),
    "agent_client.training.local_sgd": ("DiLoCo", "LocalSGD"),
    "agent_client.training.optimizer": ("FaultTolerantOptimizer", "FaultTolerantScheduler"),
    "agent_client.training.progress_push": ("push_progress",),
    "agent_client.training.sampler": ("StepSampler",),
    "agent_client.training.step_loader": ("StepLoader",),
    "lighthouse_runtime.client.clients": (
        "AsyncLighthouseClient",
        "AsyncManagerClient",
        "LighthouseClient",
        "ManagerClient",
    ),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentError",
    "AsyncLighthouseClient",
    "AsyncManagerClient",
    "CallWrapper",
    "CheckpointFolder",
    "ConfigurationError",
    "DiLoCo",
    "DistributedDataParallel",
    "EvaluationFailed",
    "EvaluationInterrupted",
    "FaultTolerantOptimizer",
    "FaultTolerantScheduler",
    "GroupDrained",
    "LighthouseClient",
    "LocalSGD",
    "ManagerClient",
    "ModelMismatch",
    "Preemption",
    "RankMismatch",
    "RestartAbort",
    "ScriptMismatch",
    "State",
    "StepLoader",
    "StepSampler",
    "StoreMixin",
    "TrainState",
    "WorldSizeMode",
    "Wrapper",
    "fork_and_monitor",
    "observe",
    "push_progress",
    "replicate",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
