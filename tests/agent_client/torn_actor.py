"""A rank whose optimizer raises in the middle of a step when it is told to, and whose script catches that and goes on;
and whose parameters change by themselves."""

from typing import Any

import torch

from agent_client.healing.keeper import Keeper
from agent_client.step.rules.loop_order import PassOrder
from agent_client.training.optimizer import FaultTolerantOptimizer
from lighthouse_protocol.messages.membership import Tag
from lighthouse_runtime.process.kept_memory import BUFFERS, buffer_path, make_buffer, read_header
from tests.agent_client.actors import AgentActor

Event = dict[str, Any]


class OutOfMemory(RuntimeError):
    pass


class Tearing(torch.optim.SGD):
    """Moves the first parameter only, and raises, where that is due."""

    is_due = False

    def step(self, closure: Any = None) -> Any:
        if not self.is_due:
            return super().step(closure)
        self.is_due = False
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise OutOfMemory("the optimizer has no memory left")


class TornEnd:
    """A module that uses the Agent, and has no memory for the buffers of a committed step when that is due."""

    can_begin_step, has_abandoned, parameters_reduced = False, False, ()
    is_due = False

    def __init__(self) -> None:
        self.module = torch.nn.Identity()
        self.pass_order = PassOrder()

    def skip_microbatch(self) -> bool:
        return False

    def contribute_zeros(self) -> bool:
        return False

    def abandon_backward(self) -> None: ...

    def share_buffers(self) -> None: ...

    def end_step(self, *, is_committed: bool) -> None:
        if self.is_due and is_committed:
            self.is_due = False
            raise OutOfMemory("the buffers have no memory left")


class TornActor(AgentActor):
    def build(self, manager: str, *, bare: bool = False, keep_every: int = 0, **options: Any) -> None:
        """`bare`: the script steps its optimizer itself."""
        super().build(manager, **options)
        self.sgd = Tearing(self.model.parameters(), lr=0.1, momentum=0.9)
        self.agent.state.optimizer = self.sgd
        self.optimizer = FaultTolerantOptimizer(self.sgd, self.agent)
        self.is_bare = bare
        self.part = TornEnd()
        self.agent.internals.add_part(self.part)
        self.buffers = [make_buffer("torn") for _ in range(BUFFERS)] if keep_every else []
        if keep_every:
            self.agent.internals.keeper = Keeper(
                self.agent.state, keep_every, [buffer_path(buffer) for buffer in self.buffers], "torn"
            )

    def train(
        self,
        until: int,
        raises: tuple[int, ...] = (),
        flips: tuple[int, ...] = (),
        skips: tuple[int, ...] = (),
        ends: tuple[int, ...] = (),
    ) -> list[Event]:
        """To that step. `raises`, `flips`, `skips`, `ends`: the steps in which that is done, each once."""
        left = {"raise": set(raises), "flip": set(flips), "skip": set(skips), "end": set(ends)}
        told: list[Event] = []
        agent = self.agent
        while agent.current_step < until:
            step, done = agent.current_step, {name: agent.current_step in steps for name, steps in left.items()}
            for name, is_now in done.items():
                if is_now:
                    left[name].discard(step)
            if done["flip"]:
                with torch.no_grad():
                    self.model[0].weight.view(-1)[step % 32].neg_()  # type: ignore[union-attr, operator]
            self.part.is_due = done["end"]
            told.append(self.take_step(raises=done["raise"], skips=done["skip"]))
        return told

    def take_step(self, *, raises: bool, skips: bool) -> Event:
        agent = self.agent
        agent.start_quorum()
        self.sgd.zero_grad()
        self.compute()
        self.reduce()
        participated, error, is_committed = agent.is_participating, "", False
        self.sgd.is_due = raises
        try:
            is_committed = self._apply(skips=skips)
        except OutOfMemory as e:
            error, is_committed = str(e), True
        self.sgd.is_due = False
        return self.describe(is_committed, participated) | {"error": error, "torn": not agent.internals.has_state}

    def _apply(self, *, skips: bool) -> bool:
        if not self.is_bare:
            return self.optimizer.step()
        is_committed = self.agent.should_commit()
        if is_committed and not skips:
            self.sgd.step()
        return is_committed

    def kept(self) -> tuple[list[int], Any]:
        """The steps that are kept in memory, and the weights of the newest."""
        steps = [header.step for buffer in self.buffers if (header := read_header(buffer)) is not None]
        assert self.agent.internals.keeper is not None
        state: Any = self.agent.internals.keeper.restore(0, 1, Tag(0, 0), torch.clone)
        return sorted(steps), [state["train"]["model"][name].tolist() for name, _ in self.model.named_parameters()]

    def keep(self) -> str:
        """What a checkpoint would hold, or why there is none."""
        try:
            return str(self.agent.state_dict())
        except RuntimeError as e:
            return str(e)
