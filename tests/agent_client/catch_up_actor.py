"""One rank that trains through DistributedDataParallel with heal_mode="catch_up", step after step until it is told."""

import math
import time
from typing import Any

import torch
from torch.optim import lr_scheduler

from agent_client.healing import catch_up, source
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.optimizer import FaultTolerantOptimizer
from tests.agent_client.actors import AgentActor, build_agent, digest, momenta
from tests.agent_client.ddp_actor import TwoBranches

Event = dict[str, Any]

SCHEDULES: dict[str, Any] = {
    "none": lambda sgd: None,
    "exponential": lambda sgd: lr_scheduler.ExponentialLR(sgd, gamma=0.99),
    "one_cycle": lambda sgd: lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=100_000),
}


class CatchUpActor(AgentActor):
    def build(
        self,
        manager: str,
        *,
        seed: int = 0,
        schedule: str = "none",
        branches: bool = False,
        heal_mode: str = "catch_up",
        others: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`branches`: every other step leaves parameters unused. `schedule` moves the learning rate at each commit.
        `others` belong to the state."""
        torch.manual_seed(seed)
        self.module = TwoBranches()
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        self.schedule = SCHEDULES[schedule](self.sgd)
        others = (others or {}) | ({"schedule": self.schedule} if self.schedule is not None else {})
        state = TrainState(self.module, self.sgd, **others)
        self.agent = build_agent(manager, state, heal_mode=heal_mode, **options)
        self.model = DistributedDataParallel(self.module, self.agent, find_unused_parameters=True, bucket_cap_mb=0.0005)
        self.optimizer = FaultTolerantOptimizer(self.sgd, self.agent)
        self.uses_branches = branches
        self.until = math.inf
        self.pace_s = 0.0
        self.told: list[Event] = []
        self._gate_fetch()

    def train(self, pace_s: float = 0.0) -> None:
        """Until `finish_at` has said how far."""
        while self.agent.current_step < self.until:
            time.sleep(pace_s)
            self.told.append(self.take_step())

    def take_step(self) -> Event:
        began_at = time.monotonic()
        agent = self.agent
        self.optimizer.zero_grad()
        place, _ = agent.slot()
        step = agent.current_step
        images = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + place))
        branch = step % 2 if self.uses_branches else 0
        self.backward(self.model(images, branch).square().mean())
        is_participating = agent.is_participating
        is_committed = self.apply()
        if is_committed and self.schedule is not None:
            self.schedule.step()
        return self.describe(is_committed, is_participating) | {
            "follows": agent.catches_up,
            "lr": self.sgd.param_groups[0]["lr"],
            "took_s": time.monotonic() - began_at,
        }

    def apply(self) -> bool:
        """Change the averaged gradients, and vote."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        return self.optimizer.step()

    def finish_at(self, step: int) -> None:
        self.until = step

    def events(self) -> list[Event]:
        """So far."""
        return list(self.told)

    def hash(self) -> str:
        return digest(*self.module.parameters(), *momenta(self.sgd))

    def have_no_room(self) -> None:
        """From now on there is no memory for another copy of anything."""
        for module in (source, catch_up):
            module.has_room = lambda size: False
