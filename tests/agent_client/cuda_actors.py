"""The actors of actors.py with their tensors on a CUDA device."""

from typing import Any

from agent_client.collectives.connectors import connector
from benchmarks.support.shared_gpu import share_gpu
from tests.agent_client.actors import AgentActor, GlooActor


class CudaGlooActor(GlooActor):
    device = "cuda"


class CudaAgentActor(AgentActor):
    device = "cuda"


class NcclActor(GlooActor):
    device = "cuda"

    def meet(self, store: str, key: str, rank: int, size: int, **options: float) -> float:
        share_gpu(rank)
        self.connector = connector("nccl")
        return super().meet(store, key, rank, size, **options)


class NcclAgentActor(CudaAgentActor):
    """NCCL between the groups."""

    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        share_gpu()
        super().build(manager, seed=seed, process_group="nccl", **options)
