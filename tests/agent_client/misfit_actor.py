"""A rank whose script is not its peers', and one that reaches no source of a state."""

from typing import Any

import torch

from tests.agent_client.actors import AgentActor

NOWHERE = "127.0.0.1:1"


class MisfitActor(AgentActor):
    """`differs_in`: width, group (one parameter group more); empty: in nothing."""

    def build(self, manager: str, *, differs_in: str = "", **options: Any) -> None:
        super().build(manager, **options)
        if differs_in == "width":
            self.model[0], self.model[1] = torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6)
            self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        elif differs_in == "group":
            self.sgd.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        self.agent.state.model, self.agent.state.optimizer = self.model, self.sgd

    def get_faults(self) -> int:
        return self.agent.internals.machine.faults


class CutOffActor(MisfitActor):
    """It asks for its state where nothing listens; the rest of its peers it reaches."""

    def build(self, manager: str, **options: Any) -> None:
        super().build(manager, **options)
        target = self.agent.internals.healing._target
        ask = target._ask
        target._ask = lambda assignment, _: ask(assignment, NOWHERE)
