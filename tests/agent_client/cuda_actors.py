"""The actors of actors.py with their tensors on a CUDA device."""

import os
from typing import Any

import torch

from agent_client.collectives.connectors import connector
from tests.agent_client.actors import AgentActor, GlooActor


class CudaGlooActor(GlooActor):
    device = "cuda"


class CudaAgentActor(AgentActor):
    device = "cuda"


class NcclActor(GlooActor):
    device = "cuda"

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        choose_device(rank)
        self.connector = connector("nccl")
        return super().meet(store, key, rank, size, **options)


class NcclAgentActor(CudaAgentActor):
    """NCCL between the groups."""

    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        choose_device(0)
        super().build(manager, seed=seed, process_group="nccl", **options)


def choose_device(number: int) -> None:
    """One of its own, or the one that there is: NCCL refuses a device that another rank of the same host has, so each
    says that it is a host of its own."""
    torch.cuda.set_device(number % torch.cuda.device_count())
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo")
