"""Replica groups of two ranks that shard a small model between them (FSDP2), and are told each of their steps."""

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from agent_client.collectives.gloo import connect_store
from agent_client.state.train_state import TrainState
from agent_client.training.hsdp import replicate
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.actors import MEETS_WITHIN_S, AgentActor, build_agent, digest
from tests.agent_client.step.test_agent import Step

RANKS = 2

Log = list[Step]


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, step: int, place: int) -> torch.Tensor:
    """Over a batch that is a function of the two."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    return model(torch.randn(16, 8, generator=generator)).square().mean()


class ShardedActor(AgentActor):
    """One rank; over two ranks some shards are uneven and one is empty."""

    def build(
        self,
        manager: str,
        *,
        meeting: str,
        key: str,
        rank: int,
        ranks: int,
        seed: int,
        way: str = "hook",
        **options: Any,
    ) -> None:
        store = PrefixStore(f"{key}/torch", connect_store(meeting, MEETS_WITHIN_S))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        self.model = model_of(seed)
        shards = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if way == "bfloat16" else MixedPrecisionPolicy()
        for part in (self.model[0], self.model[2], self.model):
            fully_shard(part, mesh=shards, mp_policy=policy)
        self.sgd = adam_of(self.model)
        state = TrainState(self.model, self.sgd)
        self.agent = build_agent(manager, state, rank, ranks, meeting, key, **options)
        replicate(self.model, self.agent)

    def compute(self) -> None:
        """Over batches that are functions of the step and of a place in the quorum."""
        slots = self.agent.slots()
        for number, (place, _) in enumerate(slots, 1):
            self.model.set_requires_gradient_sync(number == len(slots))
            loss_of(self.model, self.agent.current_step, place).backward()

    def reduce(self, **options: bool) -> None:
        """The backward pass has done it."""

    def describe(self, is_committed: bool, is_participating: bool) -> Step:
        weights = torch.cat([each.to_local().flatten() for each in self.model.parameters()])
        return super().describe(is_committed, is_participating) | {"weights": float(weights.abs().sum())}

    def loop(self, until: int) -> Log:
        """A loop whose forward pass begins each step, and whose zero_grad comes last."""
        agent, optimizer, log = self.agent, FaultTolerantOptimizer(self.sgd, self.agent), list[Step]()
        while agent.current_step < until:
            place, _ = agent.slot()
            loss_of(self.model, agent.current_step, place).backward()
            if optimizer.step():
                log.append({"step": agent.current_step, "hash": self.hash()})
            optimizer.zero_grad()
        return log

    def hash(self) -> str:
        """Of this rank's shards of weights and moments."""
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        tensors += [tensor for state in self.sgd.state.values() for tensor in state.values()]
        return digest(*(tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors))

    def clip_and_gather(self, max_norm: float) -> tuple[float, float]:
        """(the norm before, and over all ranks after) of gradients of ones."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        wholes = [parameter.grad.full_tensor() for parameter in self.model.parameters()]
        return float(before.full_tensor()), float(torch.cat([whole.flatten() for whole in wholes]).norm())

    def evaluate(self, **options: Any) -> tuple[float, int]:
        """(the loss, how often it was computed here)"""
        evaluated: list[float] = []

        def loss() -> float:
            with torch.no_grad():
                evaluated.append(float(loss_of(self.model, 0, 0)))
            return evaluated[0]

        return self.agent.evaluate_on_rank0(loss, **options), len(evaluated)
