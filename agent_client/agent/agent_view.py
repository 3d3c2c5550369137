"""What a script may ask of its Agent at any moment, and what it may say of where it is: nothing here waits, and no step
changes by it."""

from concurrent.futures import Future
from typing import Any, TypeVar

from agent_client.agent.rules.step import StepMachine
from agent_client.agent.rules.world_size import WorldSizeMode
from agent_client.agent.step_runner import StepRunner
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError
from agent_client.healing.catch_up import Follower
from agent_client.manager_client.client import ManagerLink
from agent_client.progress.progress import Block, Progress
from lighthouse_protocol.messages.membership import World

T = TypeVar("T")


class AgentView:
    """Of an Agent, which makes these parts."""

    _machine: StepMachine
    _runner: StepRunner
    _peers: Peers
    _follower: Follower | None
    _progress: Progress
    _manager: ManagerLink
    group_world_size: int

    @property
    def current_step(self) -> int:
        """Steps committed so far; while a step is under way, its number."""
        return self._machine.step

    @property
    def has_computed(self) -> bool:
        """Whether anything was computed in the step under way."""
        return self._machine.has_computed

    @property
    def steps_ended(self) -> int:
        """Steps that this rank has voted on, committed or discarded."""
        return self._machine.ended

    @property
    def moves(self) -> int:
        """Grows with every forward pass that trains, every reduction and every vote."""
        return self._machine.moves

    @property
    def accumulates(self) -> bool:
        """Whether the last forward pass was under `no_sync()`."""
        return self._machine.accumulates

    @property
    def was_committed(self) -> bool:
        """Whether the last step was committed, and nothing of the next one is computed yet."""
        return self._machine.was_committed and not self._machine.has_computed

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
    def world(self) -> World:
        """The ranks of all replica groups, those that are not admitted yet included, as this rank was told last.

        It costs nothing, and may be asked for in each step. Nobody has to: a rank that is missing holds its own group
        back before the first collective.
        """
        groups = max(1, self.num_participants)
        return self._manager.world or World(groups * self.group_world_size, groups, 0, self.group_world_size)

    @property
    def peers_pending(self) -> bool:
        """Whether a replica group asks to come in, and will be in the next quorum. It costs nothing, too."""
        return self.world.peers_pending > 0

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

    @property
    def holds_state(self) -> bool:
        """Whether the state of `current_step` is in this rank's memory, complete."""
        return not (self.catches_up or self._machine.is_torn)

    def state_dict(self) -> dict[str, Any]:
        """What names the state that this rank holds: its step and tag. The sampler's position is the step.

        Raises AgentError while that state is torn.
        """
        tag, batches = self._machine.tag, self._machine.batches_committed
        if self._machine.distrust is not None:
            raise AgentError(f"state_dict: {self._machine.distrust.text}; this is no state to keep until it has healed")
        if self._follower is not None:
            tag, batches = self._follower.held
        return {"step": tag.step, "tag_quorum_id": tag.quorum_id, "batches_committed": batches}

    # -- where this rank is, for `lighthouse ranks`

    def phase(self, name: str, total: int | None = None) -> Block:
        """A context manager: a part of the script's work, such as "validation"; `total`: how many ticks it will have.

        Phases nest. One in which nothing moves for much longer than ever before is said to be behind (docs/hangs.md).
        """
        return self._progress.phase(name, total)

    def tick(self) -> None:
        """One more batch, file, request of the innermost phase is done."""
        self._progress.tick()

    def waiting_for(self, what: str) -> Block:
        """A context manager: in its block this rank waits for others, however long that takes, and is not suspected."""
        return self._progress.waiting_for(what)

    def _await(self, what: str, done: "Future[T]") -> T:
        if done.done():
            return done.result()
        with self._progress.waiting_for(what):
            return done.result()
