"""What a healing peer takes over: everything that the script registers."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from agent_client.state.shards import Shards
from agent_client.state.snapshot import install_matches, snapshot
from agent_client.state.tree import State


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class TrainState:
    """The model, the optimizer, and whatever else has state_dict and load_state_dict (scheduler, loader, a counter).

    What the forward pass or the loop moves (the model's buffers, everything in `others`) is copied when a step begins;
    parameters, optimizer and what is `standing` stand still until the step's vote. All entries hold tensors and plain
    values only. Of what is sharded inside the group (FSDP2), each rank serves and takes its own shards.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> None:
        self.model = model
        self.optimizer = optimizer
        self.others = others
        self.standing: dict[str, Stateful] = {}
        self.stands_still = True
        """False: parameters move between a step's quorum and its vote, so no peer may read them in place."""
        self._moving: dict[str, State] = {}
        self._sharded: dict[str, State] = {}
        self._shards = self.find_shards()

    @property
    def has_shards(self) -> bool:
        return bool(self._shards)

    def holds(self, optimizer: object) -> bool:
        """Whether that optimizer heals: it is registered, or what is registered wraps it."""
        registered = (self.optimizer, *self.others.values())
        return any(optimizer is getattr(each, "wrapped", each) for each in registered)

    def compared(self) -> list[torch.Tensor]:
        """What is the same bit by bit in all ranks of one tag: the parameters, or where these take local steps, the
        global ones. An optimizer's state is not: some keep in it what is each rank's own, and what is wrong in it moves
        the parameters in the next step."""
        if self.standing:
            return [tensor for other in self.standing.values() for tensor in getattr(other, "tensors", ())]
        return list(dict.fromkeys([*self.model.parameters(), *self._optimized()]))

    def gradients_of(self) -> list[torch.Tensor]:
        """The parameters whose gradients the optimizer applies."""
        return list(self._optimized())

    def begin_step(self) -> None:
        """Copy what moves before the vote. Costs a copy of the buffers, under each name in state_dict()."""
        named = self.model.named_buffers(remove_duplicate=False)
        buffers = {name: buffer.detach().clone() for name, buffer in named}
        if not self._moving:  # the script has built its model by now
            self._shards = self.find_shards()
        shards = self._shards
        others = {name: snapshot(shards.take_out(other.state_dict())) for name, other in self.others.items()}
        self._moving = {"buffers": buffers, "others": others}
        # While FSDP's forward pass runs, state_dict() would take the gathered parameters away from it.
        self._sharded = shards.take_out(dict(self.model.state_dict())) if shards else {}

    @property
    def others_begun(self) -> dict[str, Any]:
        """`others`, as they were when the step began."""
        return self._moving["others"]  # type: ignore[return-value]

    def others_were(self, states: dict[str, State]) -> None:
        """When the step began: what the script did to them since the state that is held does not count."""
        self._moving["others"] = snapshot(states)

    def in_place(self) -> dict[str, State]:
        """The state as it was when the step began. Only what moves is copied: the rest is to be read before the vote.

        For any thread, while the forward and the backward pass run.
        """
        if not self._moving:
            self.begin_step()
        model: dict[str, Any] = dict(self._sharded or self.model.state_dict())
        buffers: Any = self._moving["buffers"]
        model |= {name: buffers[name] for name in model.keys() & buffers.keys()}
        standing = {name: other.state_dict() for name, other in self.standing.items()}
        return {
            "model": model,
            "optimizer": self._shards.take_out(self.optimizer.state_dict()),
            "others": self._moving["others"],
            "standing": self._shards.take_out(standing),
        }

    def snapshot(self) -> dict[str, State]:
        """A copy of the state as it was when the step began."""
        return snapshot(self.in_place())

    def check(self, received: dict[str, State]) -> None:
        """Raises StateMismatch or CorruptState if `received` cannot be installed here. For any thread."""
        self.check_layout(received)
        self._shards.put_back(received)

    def check_layout(self, received: dict[str, State]) -> None:
        """Raises StateMismatch where keys, shapes or dtypes differ; values are not looked at. For any thread."""
        install_matches(self.in_place(), received)

    def install(self, received: dict[str, Any]) -> None:
        """Take over a peer's state. Check it first."""
        received = self.find_shards().put_back(received)
        self.model.load_state_dict(received["model"])
        self.optimizer.load_state_dict(received["optimizer"])
        for name, other in self.others.items():
            other.load_state_dict(received["others"][name])
        for name, other in self.standing.items():
            other.load_state_dict(received["standing"][name])

    def state_dict(self) -> dict[str, State]:
        """As it is now, between two steps, for a checkpoint on disk; tensors are not copied."""
        self.begin_step()
        return self.in_place()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises StateMismatch or CorruptState before it changes anything if that does not fit."""
        self.begin_step()
        self.check(state_dict)
        self.install(state_dict)

    def find_shards(self) -> Shards:
        return Shards([*self._optimized(), *self.model.parameters()])

    def _optimized(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])
