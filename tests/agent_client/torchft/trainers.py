"""torchft training as its users write it, in a rank of tests/agent_client/ranks.py.

From here it runs on torchft's own managers, from installed.py on ours.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.agent_client.actors import digest

TIMEOUT = timedelta(seconds=30)
# A survivor that hears nothing of the death waits so long for one that has.
SUM_TIMEOUT = timedelta(seconds=5)
PACE_S = 0.02
FEATURES = 4


class Trainer:
    """One replica group of one rank. Its weights are drawn anew at every start."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        self._commits: list[dict[str, Any]] = []
        self._last_step: int | None = None
        self._dies = ""
        torch.manual_seed(os.getpid())
        self._model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))

    def train(self, replica_id: str, lighthouse: str) -> None:
        """Until finish_at says so."""
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        sgd = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)

        def load_state_dict(state: dict[str, Any]) -> None:
            self._model.load_state_dict(state["model"])
            sgd.load_state_dict(state["optimizer"])

        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=SUM_TIMEOUT),
            min_replica_size=2,
            load_state_dict=load_state_dict,
            state_dict=lambda: {"model": self._model.state_dict(), "optimizer": sgd.state_dict()},
            replica_id=replica_id,
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="localhost",
            timeout=TIMEOUT,
        )
        self._sum = self._manager.allreduce
        setattr(self._manager, "allreduce", self._sum_or_die)  # noqa: B010  pyright knows it as a method
        self._run(DistributedDataParallel(self._manager, self._model), Optimizer(self._manager, sgd))
        self._manager.shutdown()

    def die(self, where: str) -> None:
        """By SIGKILL: "in a sum", where the others wait for it, or "between steps"."""
        self._dies = where

    def _die_if(self, where: str) -> None:
        if self._dies == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def _sum_or_die(self, *args: Any, **more: Any) -> Any:
        self._manager.wait_quorum()  # so that the others wait for this one's part
        self._die_if("in a sum")
        return self._sum(*args, **more)

    def finish_at(self, step: int) -> None:
        self._last_step = step

    def control_plane(self) -> str:
        """Which module torchft's Manager has its server from."""
        return type(self._manager._manager).__module__  # pyright: ignore[reportPrivateUsage]

    def commits(self) -> list[dict[str, Any]]:
        return list(self._commits)

    def _run(self, model: Callable[[Tensor], Tensor], optimizer: Optimizer) -> None:
        while self._manager.current_step() != self._last_step:
            self._die_if("between steps")
            optimizer.zero_grad()
            model(torch.rand(4, FEATURES)).square().mean().backward()
            optimizer.step()
            self._note()
            time.sleep(PACE_S)

    def _note(self) -> None:
        step = self._manager.current_step()
        if step == (self._commits[-1]["step"] if self._commits else 0):
            return
        weights = digest(*self._model.parameters())
        self._commits.append({"step": step, "participants": self._manager.num_participants(), "weights": weights})
