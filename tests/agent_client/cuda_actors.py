"""The actors of actors.py with their tensors on a CUDA device."""

import time

import torch

from agent_client.collectives.connectors import connector
from agent_client.collectives.group_spec import GroupSpec
from tests.agent_client.actors import LOOPBACK, AgentActor, GlooActor


class CudaGlooActor(GlooActor):
    device = "cuda"


class CudaAgentActor(AgentActor):
    device = "cuda"


class NcclActor(GlooActor):
    """Each rank needs a device of its own."""

    device = "cuda"

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        """Seconds it took."""
        torch.cuda.set_device(rank)
        timeouts = {"connect_timeout_s": 60.0, "timeout_s": 100.0} | options
        began_at = time.monotonic()
        self.group = connector("nccl").connect(GroupSpec(store, key, rank, size, LOOPBACK, **timeouts))
        return time.monotonic() - began_at
