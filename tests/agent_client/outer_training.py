"""What runs in the ranks of a training_jobs.TrainingJob: LocalSGD or DiLoCo."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore
from torch.distributed.fsdp import fully_shard

from agent_client.agent.agent import Agent
from agent_client.agent.config import AgentConfig
from agent_client.agent.parts import GroupPlace
from agent_client.collectives.gloo import connect_store
from agent_client.state.train_state import TrainState
from agent_client.training.diloco import DiLoCo
from agent_client.training.local_sgd import LocalSGD, OuterSteps
from agent_client.training.sampler import StepSampler
from lighthouse_protocol.messages.membership import Assignment
from tests.agent_client.actors import LOOPBACK, digest, meet_in_group
from tests.processes import PATIENCE_S

SAMPLES = 64
INTERVAL = 4
"""Inner steps from one outer step to the next, in each of WAYS."""


def _local_sgd(model: torch.nn.Module, inner: torch.optim.Optimizer, agent: Agent) -> OuterSteps:
    return LocalSGD(model, inner, agent, sync_every=INTERVAL)


def _diloco(model: torch.nn.Module, inner: torch.optim.Optimizer, agent: Agent, **options: Any) -> OuterSteps:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(model, inner, outer, agent, sync_every=options.get("fragments", 1) * INTERVAL, **options)


def _streamed(model: torch.nn.Module, inner: torch.optim.Optimizer, agent: Agent) -> OuterSteps:
    return _diloco(model, inner, agent, fragments=2, delay=2, mixing=0.5)


def _sharded(model: torch.nn.Module, inner: torch.optim.Optimizer, agent: Agent) -> OuterSteps:
    return _diloco(model, inner, agent, fragments=2, delay=1)


WAYS: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer, Agent], OuterSteps]] = {
    "local_sgd": _local_sgd,
    "diloco": _diloco,
    "streamed": _streamed,
    "sharded": _sharded,
}
RANKS = {"sharded": 2}
"""Of a group, where it is more than one: it shards the model inside by FSDP2, and one shard is empty."""


def build_agent(
    manager: str, state: TrainState, rank: int, ranks: int, meeting: tuple[str, str], **options: Any
) -> Agent:
    """`meeting`: the store at which the ranks of the group meet, and under which key."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    return Agent(
        manager,
        state=state,
        config=AgentConfig(advertise=LOOPBACK, **options),
        place=GroupPlace(rank, ranks, meet_in_group(*meeting, rank, ranks, timeout_s=PATIENCE_S)),
    )


def shard_layers(model: torch.nn.Module, rank: int, ranks: int, meeting: tuple[str, str]) -> None:
    """Layer by layer over the ranks of the group."""
    address, key = meeting
    store = PrefixStore(f"{key}/torch", connect_store(address, PATIENCE_S))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)


def outer_tensors(optimizer: OuterSteps) -> list[torch.Tensor]:
    """All that the replica groups agree on: global parameters, and the outer optimizer's momenta."""
    state = optimizer._state
    outer = state.optimizer.state.values() if state.optimizer else []
    return [*state.tensors, *(entry["momentum_buffer"] for entry in outer if entry)]


class OuterActor:
    """One rank, which trains until it is killed or told to stop, and writes a line for each outer step."""

    def build(
        self,
        manager: str,
        *,
        way: str,
        events: str,
        seed: int,
        rank: int,
        ranks: int,
        meeting: tuple[str, str],
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        if way == "sharded":
            shard_layers(self.model, rank, ranks, meeting)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.agent = build_agent(manager, TrainState(self.model, inner), rank, ranks, meeting, **options)
        self.optimizer = WAYS[way](self.model, inner, self.agent)
        self.is_local_global = way in ("local_sgd", "diloco")
        self.is_sharded = way == "sharded"
        self.events = Path(events)
        self.is_told_to_stop = False
        self._gate_fetch()

    def train(self, pace_s: float) -> None:
        """An outer step takes at least `pace_s`."""
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(SAMPLES, 6, generator=generator)
        for batch in StepSampler(SAMPLES, 4, self.optimizer):
            if self.is_told_to_stop:
                return
            before = self.agent.current_step
            self.optimizer.zero_grad()
            self.model(inputs[batch]).square().mean().backward()
            is_kept = self.optimizer.step()
            if self.agent.current_step != before or not is_kept:
                self._write(batch.tolist(), "step" if is_kept else "discarded")
            time.sleep(pace_s / INTERVAL)

    def stop(self) -> None:
        self.is_told_to_stop = True

    def fail_once(self) -> None:
        """In its next vote it says no."""
        should_commit = self.agent.should_commit

        def should_commit_not() -> bool:
            self.agent.report_error("told to fail")
            self.agent.should_commit = should_commit  # type: ignore[method-assign]
            return should_commit()

        self.agent.should_commit = should_commit_not  # type: ignore[method-assign]

    def hold_fetch(self) -> None:
        self.may_fetch.clear()

    def allow_fetch(self) -> None:
        self.may_fetch.set()

    def wait_fetching(self) -> None:
        self.fetching.wait()

    def _write(self, batch: list[int], what: str) -> None:
        event = {
            what: self.agent.current_step,
            "time": time.time(),
            "quorum_id": self.agent.quorum_id,
            "participants": self.agent.num_participants,
            "hash": self._hash(),
            "inner_step": self.optimizer.current_step,
            "batch": batch,
        }
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def _hash(self) -> str:
        """Of all that the replica groups agree on."""
        state = self.optimizer._state
        if self.is_local_global:
            assert digest(*state.local) == digest(*state.tensors), "the local parameters are the global ones"
        found = digest(*outer_tensors(self.optimizer))
        if self.is_sharded:
            shards: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(shards, found)
            found = " ".join(shards)
        return found

    def _gate_fetch(self) -> None:
        healing = self.agent._healing
        fetch = healing.fetch
        self.fetching, self.may_fetch = threading.Event(), threading.Event()
        self.may_fetch.set()

        def fetch_when_told(assignment: Assignment) -> None:
            if assignment.heals:
                self.fetching.set()
                self.may_fetch.wait()
            fetch(assignment)

        healing.fetch = fetch_when_told  # type: ignore[method-assign]
