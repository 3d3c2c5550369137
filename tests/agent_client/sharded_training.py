"""Replica groups of two ranks that shard a small model between them (FSDP2), and are told each of their steps."""

import itertools
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from agent_client.agent.agent import Agent
from agent_client.agent.config import AgentConfig
from agent_client.agent.parts import GroupPlace
from agent_client.collectives.gloo import connect_store
from agent_client.state.train_state import TrainState
from agent_client.training.device_mesh import ManagedGroup, managed_mesh
from agent_client.training.hsdp import replicate
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.actors import LOOPBACK, MEETS_WITHIN_S, AgentActor, digest, meet_in_group
from tests.agent_client.agent.test_agent import Step
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Pending, Rank

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

    def build(self, manager: str, *, meeting: str, key: str, rank: int, seed: int, way: str, **options: Any) -> None:
        """`meeting`: a store in which the ranks of the group meet under `key`, new for each start of the group."""
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        torch.set_num_threads(1)
        store = PrefixStore(key, connect_store(meeting, MEETS_WITHIN_S))
        distributed.init_process_group("gloo", store=PrefixStore("torch", store), rank=rank, world_size=RANKS)
        self.model = model_of(seed)
        self.replicas = self._shard(way)
        self.adam = adam_of(self.model)
        self.agent = Agent(
            manager,
            state=TrainState(self.model, self.adam),
            config=AgentConfig(advertise=LOOPBACK, **options),
            place=GroupPlace(rank, RANKS, meet_in_group(meeting, f"{key}/group", rank, RANKS)),
        )
        if self.replicas is None:
            replicate(self.model, self.agent)
        else:
            self.replicas.agent = self.agent
        self._gate_fetch()

    def _shard(self, way: str) -> ManagedGroup | None:
        shards = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
        replicas = ManagedGroup() if way == "mesh" else None
        mesh = managed_mesh(replicas, shards) if replicas else shards
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if way == "bfloat16" else MixedPrecisionPolicy()
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        return replicas

    def step(self, *, error: str = "", reduces: bool = True) -> Step:
        """One step over batches that are functions of the step and of a place in the quorum."""
        agent = self.agent
        agent.start_quorum()
        self.adam.zero_grad()
        slots = agent.slots()
        for number, (place, _) in enumerate(slots, 1):
            self.model.set_requires_gradient_sync(number == len(slots))
            loss_of(self.model, agent.current_step, place).backward()
        if error:
            agent.report_error(error)
        is_participating = agent.is_participating
        is_committed = agent.should_commit()
        if is_committed:
            self.adam.step()
        return {
            "committed": is_committed,
            "participated": is_participating,
            "step": agent.current_step,
            "quorum_id": agent.quorum_id,
            "participants": list(agent.participants),
            "hash": self.hash(),
            "weights": float(torch.cat([each.to_local().flatten() for each in self.model.parameters()]).abs().sum()),
        }

    def loop(self, until: int) -> Log:
        """A loop whose forward pass begins each step, and whose zero_grad comes last."""
        agent, optimizer, log = self.agent, FaultTolerantOptimizer(self.adam, self.agent), list[Step]()
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
        tensors += [tensor for state in self.adam.state.values() for tensor in state.values()]
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


class ShardedGroup:
    """One start of a replica group: its ranks."""

    def __init__(self, name: str, ranks: Sequence[Rank]) -> None:
        self.name = name
        self.ranks = ranks

    def begin(self, method: str, *args: Any, **options: Any) -> list[Pending]:
        return [rank.begin(method, *args, **options) for rank in self.ranks]

    def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return [pending.result() for pending in self.begin(method, *args, **options)]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


class ShardedJob(Job):
    """Replica groups, each with a manager of its own that may outlive them."""

    _starts = itertools.count()

    def elsewhere(self) -> "ShardedJob":
        return ShardedJob(self._lighthouse, self.store, self._server, self._folder, self._stack)

    def start(self, *names: str, way: str = "hook", seed: int | None = None, **options: Any) -> list[ShardedGroup]:
        """Groups with weights of their own, drawn from `seed` on; the managers that are missing, too."""
        self.start_managers(*(name for name in names if name not in self.managers), ranks=RANKS)
        starts = {name: next(self._starts) for name in names}

        def start(name: str, rank: int) -> Rank:
            drawn = starts[name] if seed is None else seed + names.index(name)
            return self._start_rank(name, rank, key=f"start-{starts[name]}", way=way, seed=drawn, **options)

        with ThreadPoolExecutor(RANKS * len(names)) as pool:  # the ranks of a group meet while they are built
            ranks = list(pool.map(lambda at: start(*at), itertools.product(names, range(RANKS))))
        return [ShardedGroup(name, ranks[RANKS * at : RANKS * (at + 1)]) for at, name in enumerate(names)]

    def _start_rank(self, name: str, rank: int, **options: Any) -> Rank:
        log = self._folder / f"{name}.log" if rank == 0 else self._folder / f"{name}-{rank}.log"
        process = self._server.start("tests.agent_client.sharded_training:ShardedActor", log)
        self._stack.enter_context(process)
        process.call("build", self.addresses[name], meeting=self.store, rank=rank, **options)
        return process

    def begin_steps(self, *groups: ShardedGroup, until: int) -> dict[str, list[Pending]]:
        """All in one quorum: the last group, without which none can form, asks when all others wait."""
        pending: dict[str, list[Pending]] = {}
        for group in groups:
            pending[group.name] = group.begin("steps", until)
            if group is not groups[-1]:
                self.wait_joined(group.name)
        return pending

    def steps(self, *groups: ShardedGroup, until: int) -> dict[str, list[Log]]:
        """What each rank has tried."""
        return results(self.begin_steps(*groups, until=until))


def results(pending: dict[str, list[Pending]]) -> dict[str, list[Log]]:
    return {name: [each.result() for each in ranks] for name, ranks in pending.items()}
