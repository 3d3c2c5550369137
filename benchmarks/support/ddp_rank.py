"""The one rank of a replica group, in a process of its own, that trains a small transformer by DDP on gloo.

Its batches come from forked workers of a DataLoader, where it is told to have some: they are forked when it has
committed a step with all groups, so they hold its connections to them. The order {} makes it stop in the middle of its
next backward pass, for good. It prints the lines of training_rank.py, and "backward" when it has stopped.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from agent_client import Agent, AgentConfig, DistributedDataParallel, FaultTolerantOptimizer, TrainState
from agent_client.collectives.peers import Peers
from benchmarks.support.cluster import NAMES
from benchmarks.support.trainer import BATCH, HERE, LENGTH, TOKENS, fresh
from benchmarks.support.training_rank import tell

ENDLESS = 10**9


def tell_revocations(agent: Agent) -> None:
    """Print each, on the watch's thread, before the collectives end."""
    revoke = Peers.revoke

    def tell_and_revoke(peers: Peers, quorum_id: int | None, reason: str) -> None:
        tell("revoked", quorum_id or agent.quorum_id, agent.current_step, 0)
        revoke(peers, quorum_id, reason)

    setattr(Peers, "revoke", tell_and_revoke)  # noqa: B010  a type checker forbids the other way


class RandomText(Dataset[Tensor]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


class DdpRank:
    def __init__(self, manager: str, workers: int) -> None:
        module, sgd = fresh()
        self._agent = Agent(manager, state=TrainState(module, sgd), config=AgentConfig(advertise=HERE))
        tell_revocations(self._agent)
        self._model = DistributedDataParallel(module, self._agent)
        self._optimizer = FaultTolerantOptimizer(sgd, self._agent)
        self._batches = self._load(0)
        self._workers = workers
        self._must_stop = threading.Event()
        module.layers.layers[1].register_forward_hook(self._watch_backward)

    def run_step(self) -> None:
        agent, tokens = self._agent, next(self._batches)
        self._optimizer.zero_grad()
        logits = self._model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1)).backward()
        is_committed = self._optimizer.step()
        tell("commit" if is_committed else "discard", agent.quorum_id, agent.current_step, agent.num_participants)
        if is_committed and self._workers and agent.num_participants == len(NAMES):
            self._batches, self._workers = self._load(self._workers), 0

    def obey(self) -> None:
        """Not by sys.stdin: a forked child would wait for the lock that a reader of it holds."""
        while os.read(0, 1024):
            self._must_stop.set()

    def _load(self, workers: int) -> Iterator[Tensor]:
        context = "fork" if workers else None
        return iter(DataLoader(RandomText(), BATCH, num_workers=workers, multiprocessing_context=context))

    def _watch_backward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(self._stop_if_told)

    def _stop_if_told(self, gradient: Tensor) -> None:
        if self._must_stop.is_set():
            tell("backward", self._agent.quorum_id, self._agent.current_step, 0)
            threading.Event().wait()


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = DdpRank(told["manager"], told["workers"])
    threading.Thread(target=rank.obey, daemon=True).start()
    while True:
        rank.run_step()


if __name__ == "__main__":
    main()
