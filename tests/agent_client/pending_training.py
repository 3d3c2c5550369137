"""What runs in the ranks of test_pending.py: DiLoCo that writes down before each inner step which groups are pending,
and how often this process has called its manager so far."""

import json
import threading
import time
from typing import Any

from tests.agent_client.training_kinds import Diloco, Streamed


class PendingDiloco(Diloco):
    """By the document's loop, which asks in each of its iterations."""

    def build(self, manager: str, **options: Any) -> None:
        super().build(manager, **options)
        self.calls = 0
        self.may_go = threading.Event()
        self.may_go.set()
        link = self.agent.internals.manager
        for owner, name in ((link._client, "quorum"), (link._client, "vote"), (link._client, "status")):
            self._count(owner, name)
        self._count(link.watch, "send_vote")

    def _count(self, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return call(*arguments, **options)

        setattr(owner, name, counted)

    def compute(self) -> None:
        while self._documents_check_waits() or not self.may_go.is_set():
            time.sleep(0.01)
        self._note()
        for parameter in self.module.parameters():
            parameter.grad = parameter.detach().clone()

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
            "inner": self.outer._state.inner_steps,
            "outer": self.agent.current_step,
            "is_pending": self.agent.peers_pending,
            "pending": list(world.pending),
            "ranks": world.global_world_size,
            "calls": self.calls,
        }
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")


class PendingStreamed(PendingDiloco, Streamed):
    pass
