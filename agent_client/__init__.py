"""The library in the training process. Importing it imports no torch; what needs torch is loaded when it is named.

from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, TrainState
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

import protos

if getattr(protos, "LIGHTHOUSE_FT", None) != "lighthouse-ft":
    raise ImportError(
        f"agent_client needs lighthouse-ft's own package `protos`, but {getattr(protos, '__file__', None) or protos} "
        "stands in its place on sys.path; rename that one, or put lighthouse-ft's folder before it"
    )

# Read by gRPC when it is loaded: a script whose data loader forks would get two lines of it for each fork.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from agent_client.errors import AgentError, ConfigurationError, GroupDrained
from agent_client.world_size import WorldSizeMode
from lighthouse_runtime.clients import AsyncLighthouseClient, AsyncManagerClient, LighthouseClient, ManagerClient

if TYPE_CHECKING:
    from agent_client.agent import Agent
    from agent_client.checkpoint.folder import CheckpointFolder
    from agent_client.ddp import DistributedDataParallel
    from agent_client.diloco import DiLoCo
    from agent_client.hsdp import replicate
    from agent_client.local_sgd import LocalSGD
    from agent_client.optimizer import FaultTolerantOptimizer
    from agent_client.sampler import StepSampler
    from agent_client.train_state import TrainState

_WITH_TORCH = {
    "Agent": "agent_client.agent",
    "CheckpointFolder": "agent_client.checkpoint.folder",
    "DiLoCo": "agent_client.diloco",
    "DistributedDataParallel": "agent_client.ddp",
    "FaultTolerantOptimizer": "agent_client.optimizer",
    "LocalSGD": "agent_client.local_sgd",
    "StepSampler": "agent_client.sampler",
    "TrainState": "agent_client.train_state",
    "replicate": "agent_client.hsdp",
}

__all__ = [
    "Agent",
    "AgentError",
    "AsyncLighthouseClient",
    "AsyncManagerClient",
    "CheckpointFolder",
    "ConfigurationError",
    "DiLoCo",
    "DistributedDataParallel",
    "FaultTolerantOptimizer",
    "GroupDrained",
    "LighthouseClient",
    "LocalSGD",
    "ManagerClient",
    "StepSampler",
    "TrainState",
    "WorldSizeMode",
    "replicate",
]


def __getattr__(name: str) -> Any:
    module = _WITH_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
