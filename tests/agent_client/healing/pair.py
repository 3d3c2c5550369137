"""One source and one target in this process, without a manager."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from agent_client.healing.healing import Healing
from agent_client.progress.activity import Activity
from agent_client.state.train_state import TrainState
from agent_client.step.rules.machine import StepMachine
from lighthouse_protocol.messages.membership import Assignment
from tests.agent_client.assignments import assignment
from tests.processes import LOCALHOST

ASSIGNMENT = assignment(max_world_size=1, contributors=1, healing=(1,))
TARGETS = replace(ASSIGNMENT, replica_rank=1, max_rank=None, place=None, heal_from_rank=0, heal_from_address="a:1")


class Pair:
    """The Healing of a rank that is at step 5, and that of one at step 0."""

    def __init__(self, stack: ExitStack, timeout_s: float = 10.0) -> None:
        self.states = [make_state(seed) for seed in (1, 2)]
        self.activity = Activity(time.monotonic)
        self.source, self.target = (
            stack.enter_context(closing(Healing(state, 0, LOCALHOST, timeout_s, self.activity)))
            for state in self.states
        )
        self.machine = StepMachine(step=5, tag_quorum_id=3, batches_committed=10)
        self.target._find_address = lambda assignment, manager: self.source.address  # type: ignore[method-assign]

    def serve(self, **changes: Any) -> None:
        self.states[0].begin_step()
        self.source.serve(replace(ASSIGNMENT, serve_to=(1,), **changes), self.machine)

    def fetch(self, assignment: Assignment = TARGETS) -> None:
        self.states[1].begin_step()
        self.target.fetch(assignment)

    def weights(self) -> list[torch.Tensor]:
        return [next(iter(state.model.parameters())).detach() for state in self.states]


def make_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = torch.nn.Linear(1024, 1024)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
