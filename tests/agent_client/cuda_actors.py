"""The actors of actors.py with their tensors on a CUDA device."""

import torch

from agent_client.collectives.connectors import connector
from tests.agent_client.actors import AgentActor, GlooActor


class CudaGlooActor(GlooActor):
    device = "cuda"


class CudaAgentActor(AgentActor):
    device = "cuda"


class NcclActor(GlooActor):
    """Each rank needs a device of its own."""

    device = "cuda"

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        torch.cuda.set_device(rank)
        self.connector = connector("nccl")
        return super().meet(store, key, rank, size, **options)
