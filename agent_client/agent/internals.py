"""What the modules and optimizers of agent_client.training need of an Agent, and a training script does not."""

import itertools
import weakref
from collections.abc import Callable

from torch.distributed import HashStore, Store
from torch.optim import Optimizer

from agent_client.agent.parts import AgentParts, GroupPlace
from agent_client.agent.rules.world_size import slot_among_all
from agent_client.collectives.compiling import never_compiled
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.observed import ObservedGroup
from agent_client.errors import ConfigurationError
from agent_client.healing.catch_up import CatchUpDriver


class Internals:
    """Of one Agent, as `agent.internals`. `wait_first_quorum` returns when the first quorum is known."""

    def __init__(
        self, parts: AgentParts, place: GroupPlace, timeout_s: float, wait_first_quorum: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._place = place
        self._timeout_s = timeout_s
        self._wait_first_quorum = wait_first_quorum
        self._torch_groups = itertools.count()
        self.asks_late = False
        """A step's quorum is requested when the step begins, and not with the vote of the step before."""
        self.last_vote: tuple[weakref.ref[Optimizer], int] | None = None
        """Which FaultTolerantOptimizer has voted last, and the Agent's `moves` then."""
        self.reduce_again: Callable[[], None] | None = None

    def ask_late(self) -> None:
        """Request each quorum when its step begins, for steps that are long and depend on their quorum.

        A group that heals in such a step adds zeros: it has computed nothing of it.
        """
        self._parts.manager.asks_ahead = False
        self._parts.runner.counts_at_once = False
        self.asks_late = True

    def catch_up_for(self, optimizer: Optimizer) -> CatchUpDriver | None:
        """Return what moves `optimizer` after a commit; None: it always moves by the gradients of the step itself."""
        if self._parts.catch_up is not None:
            self._parts.catch_up.attach(optimizer)
        return self._parts.catch_up

    def refuse_catch_up(self, what: str) -> None:
        """Raise ConfigurationError if this rank may catch up, which `what` cannot."""
        if self._parts.catch_up is not None:
            raise ConfigurationError(f"heal_mode catch_up: not with {what}; use heal_mode='blocking'")

    def salvage_by(self, reduce_again: Callable[[], None]) -> None:
        """Retry a step that has lost a peer under the next quorum, with what is computed already.

        `reduce_again` reduces that again. Raises ConfigurationError if the microbatches of a step depend on its quorum.
        """
        world_size = self._parts.machine.world_size
        if world_size.is_dealt_by_quorum:
            raise ConfigurationError(
                f"salvage: in {world_size.mode} mode the next quorum may assign other microbatches to this group than "
                "those that it has computed, so that one would count twice and another not at all; leave salvage out, "
                "or use world_size_mode='dynamic'"
            )
        self.reduce_again = reduce_again

    @never_compiled
    def last_slot(self) -> tuple[int, int]:
        """Return (place, number of places) of this rank among all ranks of the last quorum; wait for the first one."""
        self._wait_first_quorum()
        return slot_among_all(self._parts.runner.last, self._place.group_rank, self._place.group_world_size)

    @property
    def group_store(self) -> Store | None:
        """Store that the ranks of this replica group share; None in a group of one."""
        return self._place.group.store if self._place.group else None

    def group_for_torch(self) -> ObservedGroup:
        """Return the ranks of this replica group, for a module of torch's that replicates inside it."""
        group = self._place.group or GlooGroup(
            HashStore(), 0, 1, self._parts.host, connect_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        return ObservedGroup(group.for_torch(f"torch/{next(self._torch_groups)}"), self._parts.progress)
