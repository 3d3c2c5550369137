"""The actors of actors.py with their tensors on a CUDA device."""

import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import HashStore

from agent_client.collectives.peers import connector
from tests.agent_client.actors import AgentActor, GlooActor
from tests.agent_client.shared_gpu import share_gpu


class CudaGlooActor(GlooActor):
    device = "cuda"


class CudaAgentActor(AgentActor):
    device = "cuda"


class NcclActor(GlooActor):
    device = "cuda"

    def make_default_group(self, monitor_sleeps_s: int) -> None:
        """As a script does for what is within its replica group, after it has made its Agent."""
        share_gpu()
        self.connector = connector("nccl")
        os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(monitor_sleeps_s)
        distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        distributed.all_reduce(torch.ones(1, device="cuda"))

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        share_gpu(rank)
        self.connector = connector("nccl")
        return super().meet(store, key, rank, size, **options)


class NcclAgentActor(CudaAgentActor):
    """NCCL between the groups."""

    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        share_gpu()
        super().build(manager, seed=seed, process_group="nccl", **options)
