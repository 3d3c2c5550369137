"""Construction of an Agent, and the methods that agent_client.training needs and a training script does not.

`make_parts` creates the parts of an Agent and connects them, so that revokes from the manager reach the collectives and
the transfers.
"""

import itertools
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import HashStore, Store
from torch.optim import Optimizer

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.observed import ObservedGroup, never_compiled
from agent_client.collectives.peers import Peers
from agent_client.errors import ConfigurationError
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.healing import Healing
from agent_client.healing.rules.catch_up import HealMode
from agent_client.manager_client.client import ManagerConnection, Presence
from agent_client.progress.progress import Progress
from agent_client.progress.trace_file import make_progress
from agent_client.state.train_state import TrainState
from agent_client.step.config import AgentConfig
from agent_client.step.environment import own_host
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.world_size import slot_among_all
from agent_client.step.runner import BackgroundThread, StepRunner
from lighthouse_runtime.client.clients import manager_at
from lighthouse_runtime.process.children import ServerProcess


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A rank's place in its replica group."""

    group_rank: int = 0
    group_world_size: int = 1
    group: GlooGroup | None = None
    """Connects the ranks. Required in a group of several ranks."""
    manager_process: ServerProcess | None = None
    """Process of the group's manager, if this rank has started it."""
    presence: Presence | None = None
    """Shows this rank to the manager until its Agent does."""

    def __post_init__(self) -> None:
        if (self.group_world_size > 1) != (self.group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")


ALONE = GroupPlace()


@dataclass(frozen=True, slots=True)
class AgentParts:
    host: str
    """Address of this host that the peers can reach."""
    machine: StepMachine
    runner: StepRunner
    thread: BackgroundThread
    manager: ManagerConnection
    peers: Peers
    healing: Healing
    catch_up: CatchUpDriver | None
    """Only with `heal_mode="catch_up"`."""
    progress: Progress


def make_parts(manager_address: str, state: TrainState, config: AgentConfig, place: GroupPlace) -> AgentParts:
    """Create the parts.

    Raises:
        ConfigurationError: The state or an option does not fit. Nothing has been opened then.
    """
    machine = StepMachine(world_size=config.counting, is_alone=place.group_world_size == 1)
    catch_up = None
    if config.heal_mode == HealMode.CATCH_UP:
        catch_up = CatchUpDriver(state, machine, lambda assignment: healing.fetch_in_background(assignment))
    host = own_host(str(manager_at(manager_address)), config.advertise)
    peers = Peers(
        place.group_rank,
        host,
        connect_timeout_s=config.connect_timeout_s,
        timeout_s=config.timeout_s,
        process_group=config.process_group,
    )
    progress = make_progress(place.group_rank)
    healing = Healing(
        state,
        place.group_rank,
        host,
        config.heal_timeout_s,
        on_received=progress.own.heal_received,
        on_begun=progress.own.heal_begins,
    )

    def revoke(quorum_id: int | None, reason: str) -> None:
        """End collectives and transfers. Runs on the watch's thread."""
        peers.revoke(quorum_id, reason)
        healing.revoke(quorum_id, reason)

    def lose_group(reason: str) -> None:
        """End everything that waits for the group. Runs on the watch's thread."""
        revoke(None, reason)
        if place.group is not None:
            place.group.abort()

    manager = ManagerConnection(
        manager_address,
        place.group_rank,
        secrets.token_hex(6) if place.presence is None else place.presence.rank_incarnation,
        revoke,
        on_group_lost=lose_group,
        returns_within_s=0.0 if place.manager_process else config.manager_restart_timeout_s,
        progress=progress,
    )
    runner = StepRunner(
        machine,
        manager,
        peers,
        healing,
        place.group,
        config,
        place.manager_process,
        catch_up,
        progress,
    )
    thread = BackgroundThread(f"lighthouse agent {place.group_rank}")
    return AgentParts(host, machine, runner, thread, manager, peers, healing, catch_up, progress)


class Internals:
    """The part of an Agent for modules and optimizers, as `agent.internals`."""

    def __init__(
        self, parts: AgentParts, place: GroupPlace, timeout_s: float, wait_first_quorum: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._place = place
        self._timeout_s = timeout_s
        self._wait_first_quorum = wait_first_quorum
        self._torch_groups = itertools.count()
        self.asks_late = False
        """True if a step's quorum is requested when the step begins, and not with the vote of the previous step."""
        self.last_vote: tuple[weakref.ref[Optimizer], int] | None = None
        """The FaultTolerantOptimizer that has voted last, and the Agent's `moves` at that time."""
        self.reduce_again: Callable[[], None] | None = None

    def ask_late(self) -> None:
        """Request each quorum when its step begins, for steps that are long and depend on their quorum.

        A group that heals in such a step adds zeros, since it has computed none of it.
        """
        self._parts.manager.asks_ahead = False
        self._parts.runner.counts_at_once = False
        self.asks_late = True

    def catch_up_for(self, optimizer: Optimizer) -> CatchUpDriver | None:
        """Return the driver that steps `optimizer` after a commit, or None without `heal_mode="catch_up"`."""
        if self._parts.catch_up is not None:
            self._parts.catch_up.attach(optimizer)
        return self._parts.catch_up

    def refuse_catch_up(self, what: str) -> None:
        """Raise ConfigurationError if this rank may catch up, which `what` does not support."""
        if self._parts.catch_up is not None:
            raise ConfigurationError(f"heal_mode catch_up: not with {what}; use heal_mode='blocking'")

    def salvage_by(self, reduce_again: Callable[[], None]) -> None:
        """Retry a step that has lost a peer under the next quorum, with the gradients that are computed already.

        Args:
            reduce_again: Reduces the gradients again.

        Raises:
            ConfigurationError: The microbatches of a step depend on its quorum.
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
        """Return place and number of places of this rank among all ranks of the last quorum.

        Waits for the first quorum.
        """
        self._wait_first_quorum()
        return slot_among_all(self._parts.runner.last, self._place.group_rank, self._place.group_world_size)

    @property
    def group_store(self) -> Store | None:
        """Store that the ranks of this replica group share, or None in a group of one."""
        return self._place.group.store if self._place.group else None

    def group_for_torch(self) -> ObservedGroup:
        """Return a process group of this replica group's ranks, for a torch module that replicates inside it."""
        group = self._place.group or GlooGroup(
            HashStore(), 0, 1, self._parts.host, connect_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        return ObservedGroup(group.for_torch(f"torch/{next(self._torch_groups)}"), self._parts.progress)
