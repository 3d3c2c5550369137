"""What runs in the ranks of test_pending.py: LocalSGD or DiLoCo that writes down before each inner step who is pending,
and how often this process has called its manager so far."""

import json
import threading
import time
from typing import Any

from agent_client.training.sampler import StepSampler
from tests.agent_client.outer_training import INTERVAL, OuterActor

SAMPLES = 64


class PendingActor(OuterActor):
    """By the document's loop, which asks in each of its iterations."""

    def build(self, manager: str, **options: Any) -> None:
        super().build(manager, **options)
        self.calls = 0
        self.may_go = threading.Event()
        self.may_go.set()
        link = self.agent._manager
        for owner, name in ((link._client, "quorum"), (link._client, "vote"), (link._client, "status")):
            self._count(owner, name)
        self._count(link._votes, "send")

    def _count(self, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return call(*arguments, **options)

        setattr(owner, name, counted)

    def train(self, pace_s: float) -> None:
        for _ in StepSampler(SAMPLES, 4, self.optimizer):
            if self.is_told_to_stop:
                return
            while self._documents_check_waits() or not self.may_go.is_set():
                time.sleep(0.01)
            self._note()
            before = self.agent.current_step
            self.optimizer.zero_grad()
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach().clone()
            is_kept = self.optimizer.step()
            if self.agent.current_step != before or not is_kept:
                self._write([], "step" if is_kept else "discarded")
            time.sleep(pace_s / INTERVAL)

    def hold(self) -> None:
        """Its next inner step takes until `go`."""
        self.may_go.clear()

    def go(self) -> None:
        self.may_go.set()

    def is_pending(self) -> bool:
        return self.agent.peers_pending

    def _documents_check_waits(self) -> bool:
        world = self.agent.world
        return world.global_world_size < world.group_world_size * world.largest_peer_group_world_size

    def _note(self) -> None:
        world = self.agent.world
        event = {
            "inner": self.optimizer._state.inner_steps,
            "outer": self.agent.current_step,
            "is_pending": self.agent.peers_pending,
            "pending": list(world.pending),
            "ranks": world.global_world_size,
            "calls": self.calls,
        }
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
