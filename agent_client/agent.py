"""Agent: what a training script holds. One object per rank; it asks for quorums, heals, reduces and votes.

Everything of a step but the vote runs on one background thread, in order: the quorum, the process group, the transfer
of state, the collectives. So the quorum overlaps the forward pass, and the first collective waits for it.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import HashStore, ProcessGroup

from agent_client.environment import Environment
from agent_client.errors import AgentError, ConfigurationError
from agent_client.healing import Healing
from agent_client.manager_link import FIRST_BACKOFF_S, MAX_BACKOFF_S, ManagerLink
from agent_client.manager_process import ManagerProcess
from agent_client.meeting import meet
from agent_client.peers import Peers
from agent_client.process_group.gloo import GlooGroup
from agent_client.step import Phase, StepMachine
from agent_client.train_state import TrainState
from agent_client.worker import BackgroundThread
from lighthouse_runtime.address import advertised_host
from protos.membership import Assignment
from protos.refusals import InvalidRequest, LighthouseError, NotServed

log = logging.getLogger(__name__)


class Agent:
    """`timeout_s` bounds each collective and each vote, `connect_timeout_s` meeting the peers of a new quorum,
    `quorum_timeout_s` each quorum, `heal_timeout_s` a transfer of state; `manager_returns_within_s` is how long a
    manager that has ended is waited for, unless this rank has started it.

    Several ranks of one group pass `group`, which connects them. Use `from_env`.
    """

    def __init__(
        self,
        manager_address: str,
        *,
        state: TrainState,
        group_rank: int = 0,
        group_world_size: int = 1,
        group: GlooGroup | None = None,
        manager_process: ManagerProcess | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        quorum_timeout_s: float = 60.0,
        heal_timeout_s: float = 300.0,
        max_consecutive_discards: int = 30,
        manager_returns_within_s: float = 10.0,
        advertise: str | None = None,
    ) -> None:
        if (group_world_size > 1) != (group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")
        self.state = state
        self.group_rank = group_rank
        self.group_world_size = group_world_size
        self._group = group
        self._timeout_s = timeout_s
        self._quorum_timeout_s = quorum_timeout_s
        self._heal_timeout_s = heal_timeout_s
        self._max_discards = max_consecutive_discards
        self._manager_process = manager_process
        self._host = advertised_host(manager_address, advertise)
        self._peers = Peers(group_rank, self._host, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s)
        self._healing = Healing(state, group_rank, self._host, heal_timeout_s)
        self._thread = BackgroundThread(f"lighthouse agent {group_rank}")
        self._machine = StepMachine()
        self._manager = ManagerLink(
            manager_address,
            group_rank,
            secrets.token_hex(6),
            self._peers.revoke,
            returns_within_s=0.0 if manager_process else manager_returns_within_s,
        )
        self._groups_for_torch = itertools.count()
        self._round: Future[None] | None = None
        self._last: Assignment | None = None
        self._unanswered = 0

    @classmethod
    def from_env(cls, *, state: TrainState, **options: Any) -> "Agent":
        """Finds its manager, its group and its place in the environment, as under torchrun.

        Given only LIGHTHOUSE_ADDRESS and REPLICA_GROUP_ID, rank 0 starts the group's manager. `options` are those of
        Agent. Raises ConfigurationError naming the variable.
        """
        env = Environment.read()
        options.setdefault("advertise", env.advertise)
        address, process, group = meet(env, float(options.get("timeout_s", 60.0)))
        return cls(
            address,
            state=state,
            group_rank=env.group_rank,
            group_world_size=env.group_world_size,
            group=group,
            manager_process=process,
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave: end the collectives, the connections and, if this rank started it, the manager."""
        self._manager.close()
        self._peers.drop()
        self._thread.close(5.0)
        self._healing.close()
        if self._group is not None:
            self._group.abort()
        if self._manager_process is not None:
            self._manager_process.stop()

    # -- what a script asks

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
        return self._last.quorum_id if self._last else 0

    @property
    def participants(self) -> tuple[str, ...]:
        """The replica ids of the last quorum, by replica_rank."""
        return self._last.replica_ids if self._last else ()

    @property
    def num_participants(self) -> int:
        return len(self.participants)

    @property
    def is_participating(self) -> bool:
        """Whether this rank's gradients count in the step under way."""
        self.wait_quorum()
        return self._machine.contributes

    def slot(self) -> tuple[int, int]:
        """(place, number of places) of this rank among all ranks of the last quorum; waits for the first one."""
        if self._last is None:
            self.start_quorum()
            self.wait_quorum()
        if self._last is None:
            return self.group_rank, self.group_world_size
        place = self._last.replica_rank * self.group_world_size + self.group_rank
        return place, self._last.replica_world_size * self.group_world_size

    def group_for_torch(self) -> ProcessGroup:
        """The ranks of this replica group, for a module of torch's that replicates inside it."""
        group = self._group or GlooGroup(
            HashStore(), 0, 1, self._host, connect_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        return group.for_torch(f"torch/{next(self._groups_for_torch)}")

    # -- one step

    def start_quorum(self) -> None:
        """Begin a step: ask for its quorum in the background. Once a step; further calls do nothing."""
        if self._machine.phase is not Phase.IDLE:
            return
        self._machine.ask()
        self.state.begin_step()
        self._round = self._thread.submit(self._run_round)

    def wait_quorum(self) -> None:
        """Until the quorum of this step is known, its process group made and a peer's state received.

        Raises AgentError if this rank can never get one.
        """
        if self._round is not None:
            self._round.result()

    def all_reduce(self, tensor: torch.Tensor) -> "Future[torch.Tensor]":
        """The mean over the contributing participants, and over the ranks of the group, in place.

        A lost peer does not fail the future: it marks the step, which is then discarded, and leaves `tensor` undefined.
        """
        return self._thread.submit(lambda: self._reduce(tensor))

    def report_error(self, error: BaseException | str) -> None:
        """This step must not commit."""
        reason = str(error)
        self._thread.submit(lambda: self._machine.failed(reason)).result()

    def should_commit(self) -> bool:
        """Install a peer's state if there is one, vote, and learn the decision of all ranks of the group.

        True: apply the gradients now. Raises AgentError after `max_consecutive_discards`, or if this rank voted yes and
        cannot learn the decision.
        """
        self.wait_quorum()
        self._thread.submit(self._reach_all).result()
        self._install()
        commit = self._vote()
        failure = self._machine.failure
        self._machine.decided(commit)
        if self._machine.tag_quorum_id is None and not commit:
            raise AgentError(f"a peer's state was installed in part: {failure}; restart the group")
        if not commit:
            self._note_discard(failure or "another rank of the group voted no")
        return commit

    # -- on the background thread

    def _run_round(self) -> None:
        machine = self._machine
        try:
            assignment = self._ask_manager()
        except (InvalidRequest, NotServed) as e:
            raise AgentError(f"the manager at {self._manager.address} refuses this rank: {e}") from e
        except LighthouseError as e:
            self._check_manager(e)
            time.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._unanswered))
            self._unanswered += 1
            return machine.unanswered(str(e))
        machine.answered(assignment)
        self._last, self._unanswered = assignment, 0
        if (reason := self._why_revoked(assignment)) is not None:
            return machine.failed(reason)
        self._guarded("making the process group", lambda: self._peers.configure(assignment))
        self._guarded("serving the state", lambda: self._healing.serve(assignment, machine))
        self._guarded("healing", lambda: self._healing.fetch(assignment))
        return None

    def _ask_manager(self) -> Assignment:
        """A quorum for this step. One that was revoked before it was used is given back by a no, where no other rank
        of the group can have begun the step."""
        machine = self._machine
        while True:
            assignment = self._manager.ask(
                machine.step,
                self._healing.address,
                timeout_s=self._quorum_timeout_s,
                tag_quorum_id=machine.tag_quorum_id,
                commit_failures=machine.discards,
            )
            if self.group_world_size > 1 or self._why_revoked(assignment) is None:
                return assignment
            step, quorum_id = assignment.max_step, assignment.quorum_id
            self._manager.vote(step, False, quorum_id=quorum_id, timeout_s=self._timeout_s)
            machine.passed_over()

    def _why_revoked(self, assignment: Assignment) -> str | None:
        reason = self._manager.revoked(assignment.quorum_id)
        if reason is None and assignment.revoked:
            reason = "told with the answer"
        return None if reason is None else f"quorum {assignment.quorum_id} was revoked: {reason}"

    def _check_manager(self, error: LighthouseError) -> None:
        """A manager that is gone ends this rank; one that answers has only had no quorum."""
        if self._manager_process is not None and not self._manager_process.is_alive:
            raise AgentError("the group's manager has ended; restart the group") from error
        self._manager.check_alive(error)

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The group's own sum is always taken, whatever has failed: its other ranks wait in it."""
        group = self._group
        if group is not None:
            self._guarded("reducing inside the group", lambda: group.all_reduce(tensor, self._limit_s()))
            tensor /= self.group_world_size
        if not self._machine.contributes:
            tensor.zero_()
        self._reduce_over_peers(tensor)
        return tensor

    def _reduce_over_peers(self, tensor: torch.Tensor) -> None:
        assignment = self._machine.assignment
        if assignment is None or self._machine.failure is not None:
            return
        if self._guarded("reducing", lambda: self._peers.all_reduce(tensor, self._limit_s())):
            self._machine.reduced()
            tensor /= assignment.contributors

    def _limit_s(self) -> float:
        """How long a collective or a vote of this step may take: where somebody heals, the others wait for it."""
        assignment = self._machine.assignment
        heals = assignment is not None and assignment.contributors < assignment.replica_world_size
        return self._timeout_s + (self._heal_timeout_s if heals else 0.0)

    def _reach_all(self) -> None:
        """A step that reduced nothing has still to know that every participant is in it."""
        if not self._machine.has_reduced:
            self._reduce_over_peers(torch.zeros(1))

    def _guarded(self, what: str, act: Callable[[], object]) -> bool:
        """Whether `act` succeeded. A failure marks the step, and ends it for the peers too."""
        try:
            act()
        except Exception as e:  # noqa: BLE001  whatever it was, the next quorum repairs it
            log.warning("step %d: %s failed: %s", self._machine.step, what, _first_line(e))
            self._machine.failed(f"{what}: {_first_line(e)}")
            self._peers.drop()
            return False
        return True

    # -- the vote

    def _install(self) -> None:
        machine = self._machine
        assignment = machine.assignment
        if assignment is not None and machine.failure is None:
            self._guarded("installing a peer's state", lambda: self._healing.install(assignment, machine))

    def _vote(self) -> bool:
        """Without the decision a rank that voted yes cannot go on: the others may have committed."""
        vote, machine = self._machine.vote(), self._machine
        step = machine.assignment.max_step if machine.assignment else machine.step
        quorum_id = machine.assignment.quorum_id if machine.assignment else None
        try:
            return self._manager.vote(step, vote, quorum_id=quorum_id, timeout_s=self._limit_s())
        except LighthouseError as e:
            if not vote:
                return False
            raise AgentError(f"voted yes for step {step} and cannot learn the decision: {e}; restart the group") from e

    def _note_discard(self, reason: str) -> None:
        machine = self._machine
        log.warning("step %d discarded: %s", machine.step, reason)
        if machine.discards >= self._max_discards:
            raise AgentError(f"{machine.discards} steps discarded in a row (max_consecutive_discards): {reason}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
