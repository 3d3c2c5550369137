"""Makes the parts of an Agent and ties them: what the manager tells reaches the collectives and the transfers."""

import secrets
from dataclasses import dataclass

from agent_client.agent.background_thread import BackgroundThread
from agent_client.agent.config import AgentConfig
from agent_client.agent.environment import own_host
from agent_client.agent.rules.step import StepMachine
from agent_client.agent.step_runner import StepRunner
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import ConfigurationError
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.healing import Healing
from agent_client.healing.rules.modes import HealMode, HealTransport, StateServing
from agent_client.manager_client.client import ManagerConnection
from agent_client.manager_client.presence import Presence
from agent_client.progress.progress import Progress
from agent_client.progress.trace_file import make_progress
from agent_client.state.train_state import TrainState
from lighthouse_runtime.client.manager import manager_at
from lighthouse_runtime.process.daemon_child import ServerProcess


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A rank's place in its replica group. Raises ConfigurationError for several ranks without a `group`."""

    group_rank: int = 0
    group_world_size: int = 1
    group: GlooGroup | None = None
    """Connects the ranks of a group of several."""
    manager_process: ServerProcess | None = None
    """The group's manager, if this rank has started it."""
    presence: Presence | None = None
    """Shows this rank to the manager until its Agent does."""

    def __post_init__(self) -> None:
        if (self.group_world_size > 1) != (self.group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")


ALONE = GroupPlace()


@dataclass(frozen=True, slots=True)
class AgentParts:
    """`host`: the address of this host that the peers can reach. `catch_up`: with heal_mode catch_up only."""

    host: str
    machine: StepMachine
    runner: StepRunner
    thread: BackgroundThread
    manager: ManagerConnection
    peers: Peers
    healing: Healing
    catch_up: CatchUpDriver | None
    progress: Progress


def make_parts(manager_address: str, state: TrainState, config: AgentConfig, place: GroupPlace) -> AgentParts:
    """Raises ConfigurationError for a state or an option that does not fit; then nothing has been opened."""
    machine = StepMachine(world_size=config.counting, is_alone=place.group_world_size == 1)
    catch_up = None
    if config.heal_mode == HealMode.CATCH_UP:
        catch_up = CatchUpDriver(state, machine, lambda assignment: healing.fetch_beside(assignment))
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
        state_serving=StateServing(config.state_serving),
        transport=HealTransport(config.heal_transport),
        on_received=progress.own.heal_received,
        on_begun=progress.own.heal_begins,
    )

    def revoke(quorum_id: int | None, reason: str) -> None:
        """On the watch's thread."""
        peers.revoke(quorum_id, reason)
        healing.revoke(quorum_id, reason)

    def lose_group(reason: str) -> None:
        """On the watch's thread."""
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
