"""One rank that trains in any of WAYS, and can be held in the middle of a step or of a transfer of its state."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from agent_client.agent.agent import Agent
from agent_client.state.encoding import Encoding
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.hsdp import replicate
from agent_client.training.local_sgd import OuterSteps
from agent_client.training.optimizer import FaultTolerantOptimizer
from agent_client.training.sampler import Position, StepSampler
from tests.agent_client import outer_training
from tests.agent_client.actors import digest
from tests.agent_client.healing_actor import Ballast
from tests.agent_client.outer_training import SAMPLES, build_agent, outer_tensors, shard_layers

WAYS = ("plain", "ddp", "salvage", "hsdp", "local_sgd", "diloco")
INPUTS, HIDDEN = 8, 16
CHUNK_BYTES = 2**18
CHUNKS_BEFORE_HOLD = 3
HELD_AT_REDUCTION = 2
"""Of one step, of which every way has several: the rank is held between two of them."""


class PlainSteps(FaultTolerantOptimizer):
    """The plain calls of the Agent: each gradient is handed to it, and then it is asked whether to go on."""

    def step(self, closure: Callable[[], float] | None = None) -> bool:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for reduced in [self._agent.all_reduce(parameter.grad) for parameter in parameters]:
            reduced.result()
        return super().step(closure)


class MatrixActor:
    """Trains until it is killed or has committed the step that `finish` names; writes a line for each step."""

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
    ) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        if way == "hsdp":
            shard_layers(self.module, rank, ranks, meeting)
        inner = AdamW(self.module.parameters(), lr=0.01)
        self.agent = build_agent(manager, TrainState(self.module, inner), rank, ranks, meeting)
        self.ballast = Ballast(seed)
        self.agent.state.standing["ballast"] = self.ballast
        self._gate_reduction()
        self._gate_sending()
        self.model, self.optimizer = self._wrap(way, inner)
        self.events = Path(events)
        self.last_step: int | None = None

    def _wrap(self, way: str, inner: Optimizer) -> tuple[nn.Module, FaultTolerantOptimizer]:
        """What the training loop calls."""
        module, agent = self.module, self.agent
        if way in outer_training.WAYS:
            return module, outer_training.WAYS[way](module, inner, agent)
        if way == "plain":
            return module, PlainSteps(inner, agent)
        if way == "hsdp":
            replicate(module, agent)
            return module, FaultTolerantOptimizer(inner, agent)
        model = DistributedDataParallel(module, agent, salvage=way == "salvage", bucket_cap_mb=0.0001)
        return model, FaultTolerantOptimizer(inner, agent)

    # -- training

    def train(self, pace_s: float) -> dict[str, Any]:
        """What it wrote last."""
        optimizer, agent = self.optimizer, self.agent
        is_outer = isinstance(optimizer, OuterSteps)
        inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(7))
        position: Position = optimizer if is_outer else agent
        event: dict[str, Any] = {}
        for batch in StepSampler(SAMPLES, 4, position):
            before, self.reductions = agent.current_step, 0
            optimizer.zero_grad()
            self.model(inputs[batch]).square().mean().backward()
            is_kept = optimizer.step()
            if agent.current_step != before or not is_kept:
                event = self._write("step" if is_kept else "discarded")
            if self.last_step is not None and agent.current_step >= self.last_step:
                return event
            time.sleep(pace_s / outer_training.INTERVAL if is_outer else pace_s)
        raise AssertionError("a sampler has no end")

    def finish(self, after_step: int) -> None:
        self.last_step = after_step

    def _write(self, what: str) -> dict[str, Any]:
        agent = self.agent
        event = {
            what: agent.current_step,
            "time": time.time(),
            "quorum_id": agent.quorum_id,
            "participants": agent.num_participants,
            "hash": digest(*self._shared_tensors(), self.ballast.numbers),
        }
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
        return event

    def _shared_tensors(self) -> list[Tensor]:
        """Weights and optimizer state that are the same in the same rank of all replica groups."""
        if isinstance(self.optimizer, OuterSteps):
            outer: Any = self.optimizer
            state = outer._state
            assert digest(*state.local) == digest(*state.tensors), "the local parameters are the global ones"
            return outer_tensors(self.optimizer)
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        tensors = [*self.module.parameters(), *moments]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    # -- in the middle of a step

    def hold_step(self) -> None:
        """The next step stops between two of its reductions."""
        self.is_held.clear()
        self.may_reduce.clear()

    def wait_held(self) -> int:
        """The step."""
        self.is_held.wait()
        return self.agent.current_step

    def go_on(self) -> None:
        self.may_reduce.set()

    def is_in_step(self, step: int) -> bool:
        """It has come as far as one that is held in that step."""
        return self.agent.current_step == step and self.reductions >= HELD_AT_REDUCTION

    def _gate_reduction(self) -> None:
        self.is_held, self.may_reduce = threading.Event(), threading.Event()
        self.may_reduce.set()
        self.reductions = 0
        agent: Agent = self.agent
        all_reduce = agent.all_reduce

        def reduce_when_told(tensor: Tensor, **options: bool) -> "Future[Tensor]":
            self.reductions += 1
            if self.reductions == HELD_AT_REDUCTION and not self.may_reduce.is_set():
                self.is_held.set()
                self.may_reduce.wait()
            return all_reduce(tensor, **options)

        agent.all_reduce = reduce_when_told  # type: ignore[method-assign]

    # -- in the middle of a transfer

    def hold_sending(self) -> None:
        """Every transfer from here stops after some of its bytes."""
        self.may_send.clear()

    def allow_sending(self) -> None:
        self.may_send.set()

    def received(self) -> tuple[str, int, int]:
        """(from which group, how many bytes so far, of how many) of the transfer to here that is under way."""
        agent: Any = self.agent
        fetch = agent._healing._target._fetch
        return (fetch._machine._left[0], fetch._received, fetch._length) if fetch else ("", 0, 0)

    def _gate_sending(self) -> None:
        self.may_send = threading.Event()
        self.may_send.set()
        agent: Any = self.agent
        agent._healing._source._server._chunk_bytes = CHUNK_BYTES

        def chunks(encoding: Encoding, start: int, real: Any = Encoding.chunks) -> Iterator[memoryview]:
            for number, chunk in enumerate(real(encoding, start)):
                if number >= CHUNKS_BEFORE_HOLD:
                    self.may_send.wait()
                yield chunk

        Encoding.chunks = chunks  # type: ignore[method-assign]
