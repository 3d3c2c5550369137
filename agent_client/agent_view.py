"""What a script may ask of its Agent at any moment: nothing here waits, and nothing changes by it."""

from agent_client.follower import Follower
from agent_client.peers import Peers
from agent_client.step import StepMachine
from agent_client.step_runner import StepRunner
from agent_client.world_size import WorldSizeMode


class AgentView:
    """Of an Agent, which makes these parts."""

    _machine: StepMachine
    _runner: StepRunner
    _peers: Peers
    _follower: Follower | None

    @property
    def current_step(self) -> int:
        """Steps committed so far; while a step is under way, its number."""
        return self._machine.step

    @property
    def batches_committed(self) -> int:
        """Over all replica groups."""
        return self._machine.batches_committed

    @property
    def quorum_id(self) -> int:
        """Of the last quorum; 0 before the first."""
        return self._runner.last.quorum_id if self._runner.last else 0

    @property
    def participants(self) -> tuple[str, ...]:
        """The replica ids of the last quorum, by replica_rank."""
        return self._runner.last.replica_ids if self._runner.last else ()

    @property
    def num_participants(self) -> int:
        return len(self.participants)

    @property
    def last_reconfiguration_s(self) -> float:
        """How long it took to give up the last quorum's process group and to make the present one."""
        return self._peers.last_reconfiguration_s

    @property
    def world_size_mode(self) -> WorldSizeMode:
        return self._machine.world_size.mode

    @property
    def catches_up(self) -> bool:
        """Whether this rank works at a later state than it holds."""
        return self._follower is not None and self._follower.catch_up.follows
