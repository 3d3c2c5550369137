"""A rank whose steps are told in full: what it reduces, and in which order."""

import os
import threading
import time
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from agent_client.errors import EvaluationInterrupted, ScriptMismatch
from agent_client.state.train_state import TrainState
from agent_client.step.comparison import Part
from agent_client.training.sampler import StepSampler
from tests.agent_client.actors import build_agent


class ScriptedActor:
    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.agent = build_agent(manager, TrainState(self.model, self.sgd), **options)

    def step(self, *reduced: tuple[int, str, str]) -> dict[str, Any]:
        """Sums of so many elements of a dtype, called so."""
        self.reduce(*reduced)
        return self.vote()

    def draw(self, length: int, batch_size: int, seed: int) -> dict[str, Any]:
        """A step on a batch of a sampler."""
        next(iter(StepSampler(length, batch_size, self.agent, seed)))
        return self.step((8, "float32", "weights")) | {"data": self.agent.data_report()}

    def divide_data(self) -> None:
        """Among the ranks of this group alone, as a script does under torchrun."""
        self.sampler = DistributedSampler(range(40), self.agent.group_world_size, self.agent.group_rank)  # type: ignore[arg-type]

    def take_turn(self) -> dict[str, Any]:
        """Of one of two networks: by the quorum's step, not by a counter of the script's own."""
        self.agent.start_quorum()
        turn = (self.agent.quorum_step or 0) % 2
        self.agent.all_reduce(torch.ones(8), name=("critic", "generator")[turn]).result()
        return self.vote() | {"turn": turn}

    def reduce(self, *reduced: tuple[int, str, str]) -> None:
        self.agent.start_quorum()
        for length, dtype, name in reduced:
            self.agent.all_reduce(torch.ones(length, dtype=getattr(torch, dtype)), name=name).result()

    def step_of_buckets(self, *buckets: tuple[int, float], between: bool = False) -> dict[str, Any]:
        """Their sizes and what they are filled with: announced together. `between`: something else is reduced after
        the first one. Also how often the participants have compared."""
        compared, exchange = list[object](), self.agent.internals.peers.exchange

        def count(words: Any, timeout_s: float) -> Any:
            compared.append(words)
            return exchange(words, timeout_s)

        self.agent.internals.peers.exchange = count  # type: ignore[method-assign]
        parts = [Part(f"bucket {i}", size, torch.float32) for i, (size, _) in enumerate(buckets)]
        self.agent.start_quorum()
        for i, (size, value) in enumerate(buckets):
            tensor, rest = torch.full((size,), value), parts[i + 1 :]
            self.agent.all_reduce(tensor, name=parts[i].name, followed_by=rest).result()
            if between and i == 0:
                self.agent.all_reduce(torch.ones(5), name="metric").result()
        told = self.vote() | {"compared": len(compared)}
        self.agent.internals.peers.exchange = exchange  # type: ignore[method-assign]
        return told

    def steps_of_buckets(self, count: int, *buckets: tuple[int, float], **options: Any) -> list[dict[str, Any]]:
        return [self.step_of_buckets(*buckets, **options) for _ in range(count)]

    def vote(self) -> dict[str, Any]:
        agent = self.agent
        began_at = time.monotonic()
        try:
            is_committed = agent.should_commit()
        except ScriptMismatch as e:
            return {"mismatch": str(e), "took_s": time.monotonic() - began_at}
        return {
            "committed": is_committed,
            "step": agent.current_step,
            "quorum_id": agent.quorum_id,
            "participants": list(agent.participants),
            "discards": (agent.internals.machine.discards, agent.internals.machine.faults),
        }

    def steps(self, until: int, *reduced: tuple[int, str, str]) -> list[dict[str, Any]]:
        tried: list[dict[str, Any]] = []
        while self.agent.current_step < until:
            tried.append(self.step(*reduced))
        return tried

    def check_equal(self) -> str:
        """Before the first step."""
        try:
            self.agent.check_equal("batches per epoch", 7)
        except (EvaluationInterrupted, ScriptMismatch) as e:
            return str(e)
        return ""

    def begin_training(self, *reduced: tuple[int, str, str]) -> None:
        """Step after step beside what else is asked for, until `end_training`."""
        self.tried: list[dict[str, Any]] = []
        self.must_end = threading.Event()
        self.training = threading.Thread(target=self._train, args=reduced, daemon=True)
        self.training.start()

    def _train(self, *reduced: tuple[int, str, str]) -> None:
        while not self.must_end.is_set():
            self.tried.append(self.step(*reduced))
            time.sleep(0.01)

    def tried_steps(self) -> list[dict[str, Any]]:
        return list(self.tried)

    def end_training(self) -> list[dict[str, Any]]:
        self.must_end.set()
        self.training.join(60.0)
        return self.tried

    def close(self) -> None:
        """As a script that has come to its end."""
        self.agent.close()

    def end(self) -> None:
        """As a process does that an exception ends."""
        os._exit(1)
