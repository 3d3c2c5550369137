"""What a rank does in one step: ask for the quorum, meet the peers, heal, reduce, install, vote.

`begin`, `reduce` and `reach_all` belong to the background thread, in the order in which they were asked for; `finish`
to the script's, when all of these are done.
"""

import functools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from agent_client.errors import AgentError, first_line
from agent_client.follower import Follower
from agent_client.healing import Healing
from agent_client.manager_link import FIRST_BACKOFF_S, MAX_BACKOFF_S, ManagerLink
from agent_client.manager_process import ManagerProcess
from agent_client.numbers import Entry
from agent_client.own_marks import Shape
from agent_client.peers import Peers
from agent_client.process_group.gloo import GlooGroup
from agent_client.progress import Block, Progress
from agent_client.quorum_log import log_quorum
from agent_client.step import StepMachine
from protos.membership import PLAIN, Assignment
from protos.refusals import InvalidRequest, LighthouseError, NotServed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: of each collective and each vote, of each quorum, of a transfer of state. And how many discards in a
    row."""

    step_s: float
    quorum_s: float
    heal_s: float
    discards: int


class StepRunner:
    """`last` is the last quorum, as it was assigned. `group` connects the ranks of a group of several. `progress` is
    told what is waited for, and of each collective.

    `manager_process`: the manager, where it is a child of this process. `follower`: where this rank may catch up.
    """

    def __init__(
        self,
        machine: StepMachine,
        manager: ManagerLink,
        peers: Peers,
        healing: Healing,
        group: GlooGroup | None,
        limits: Limits,
        manager_process: ManagerProcess | None,
        follower: Follower | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.machine = machine
        self.progress = progress or Progress()
        self.last: Assignment | None = None
        self._manager = manager
        self._peers = peers
        self._healing = healing
        self._group = group
        self._group_world_size = group.size if group is not None else 1
        self._limits = limits
        self._manager_process = manager_process
        self._follower = follower
        self._unanswered = 0

    def begin(self, asked_for: int) -> None:
        """`asked_for`: so many reductions, before this step."""
        machine = self.machine
        with self.progress.asking("quorum"):
            assignment = self._ask_patiently()
        if isinstance(assignment, LighthouseError):
            return machine.unanswered(str(assignment))
        machine.answered(assignment)
        self.progress.numbers.begin(assignment.quorum_id, asked_for)
        log_quorum(self.last, assignment)
        self.last, self._unanswered = assignment, 0
        if self._follower is not None:
            self._follower.answered(assignment)
            self._manager.asks_ahead = not assignment.catches_up
        why_revoked = functools.partial(self._why_revoked, assignment)
        if (reason := why_revoked()) is not None:
            return machine.failed(reason)
        with self.progress.asking("peers"):
            self._guarded("making the process group", lambda: self._peers.configure(assignment, why_revoked))
        self._guarded("serving the state", lambda: self._healing.serve(assignment, machine))
        if not assignment.catches_up:
            self._heal(assignment)
        return None

    def _heal(self, assignment: Assignment) -> None:
        with self.progress.busy("heal") if assignment.heals else nullcontext():
            self._guarded("healing", lambda: self._healing.fetch(assignment))

    def _ask_patiently(self) -> Assignment | LighthouseError:
        """A manager that is gone is asked again until it is back: the group's other ranks may wait for what this one
        asks, and not for its next gradients. One that answers, but has no quorum, is asked again in the next round."""
        while True:
            try:
                return self._ask_manager()
            except (InvalidRequest, NotServed) as e:
                raise AgentError(f"the manager at {self._manager.address} refuses this rank: {e}") from e
            except LighthouseError as e:
                is_alive = self._check_manager(e)
                time.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._unanswered))
                self._unanswered += 1
                if is_alive:
                    return e

    def _ask_manager(self) -> Assignment:
        """A quorum for this step. One that was revoked before it was used is given back by a no, where no other rank
        of the group can have begun the step."""
        machine = self.machine
        while True:
            assignment = self._manager.ask(
                machine.step,
                self._healing.address,
                timeout_s=self._limits.quorum_s,
                tag_quorum_id=machine.tag_quorum_id,
                commit_failures=machine.discards,
                catch_up=self._follower.words() if self._follower is not None else PLAIN,
            )
            if self._group_world_size > 1 or self._why_revoked(assignment) is None:
                return assignment
            step, quorum_id = assignment.max_step, assignment.quorum_id
            self._manager.vote(step, False, quorum_id=quorum_id, timeout_s=self._limits.step_s)
            machine.passed_over()

    def _why_revoked(self, assignment: Assignment) -> str | None:
        reason = self._manager.revoked(assignment.quorum_id)
        if reason is None and assignment.revoked:
            reason = "told with the answer"
        return None if reason is None else f"quorum {assignment.quorum_id} was revoked: {reason}"

    def _check_manager(self, error: LighthouseError) -> bool:
        """Whether it answers, and has only had no quorum. One that is gone for good ends this rank."""
        if self._manager_process is not None and not self._manager_process.is_alive:
            raise AgentError("the group's manager has ended; restart the group") from error
        return self._manager.check_alive(error)

    def reduce(self, tensor: torch.Tensor, within_group: bool, entry: Entry) -> torch.Tensor:
        """The group's own sum is always taken, whatever has failed: its other ranks wait in it."""
        group = self._group
        if group is not None and within_group:
            with self.inside(entry, "all_reduce", tensor.shape, within_group=True):
                self._guarded("reducing inside the group", lambda: group.all_reduce(tensor, self._limit_s()))
            tensor /= self._group_world_size
        if not self.machine.contributes:
            tensor.zero_()
        self._reduce_over_peers(tensor, entry)
        return tensor

    def sum_over_group(self, tensor: torch.Tensor, entry: Entry) -> None:
        """Raises RuntimeError."""
        if self._group is not None:
            with self.inside(entry, "all_reduce", tensor.shape, within_group=True):
                self._group.all_reduce(tensor)

    def inside(self, entry: Entry, operation: str, shape: Shape = "", *, within_group: bool) -> Block:
        quorum_id, number, inner = self.progress.numbers.told(entry, within_group=within_group)
        return self.progress.collective(quorum_id, number, operation, shape, within_group=within_group, inner=inner)

    def _reduce_over_peers(self, tensor: torch.Tensor, entry: Entry) -> None:
        assignment = self.machine.assignment
        if assignment is None or self.machine.failure is not None:
            return
        with self.inside(entry, "all_reduce", tensor.shape, within_group=False):
            is_reduced = self._guarded("reducing", lambda: self._peers.all_reduce(tensor, self._limit_s()))
        if is_reduced:
            self.machine.reduced()
            tensor /= self.machine.share.divisor

    def _limit_s(self) -> float:
        """How long a collective or a vote of this step may take: where somebody heals, the others wait for it."""
        assignment = self.machine.assignment
        heals = assignment is not None and assignment.has_healing
        return self._limits.step_s + (self._limits.heal_s if heals else 0.0)

    def reach_all(self) -> None:
        """A step that reduced nothing has still to know that every participant is in it."""
        if not self.machine.has_reduced:
            self._reduce_over_peers(torch.zeros(1), self.progress.numbers.over())  # the script waits for this

    def _guarded(self, what: str, act: Callable[[], object]) -> bool:
        """Whether `act` succeeded. A failure marks the step, and ends it for the peers too."""
        try:
            act()
        except Exception as e:  # noqa: BLE001  whatever it was, the next quorum repairs it
            log.warning("step %d: %s failed: %s", self.machine.step, what, first_line(e))
            self.machine.failed(f"{what}: {first_line(e)}")
            self._peers.drop()
            return False
        return True

    # -- on the script's thread

    def finish(self) -> bool:
        """Install, vote, and learn the decision. Raises AgentError where this rank cannot go on."""
        machine = self.machine
        self._install()
        commit = self._vote()
        self._healing.release(is_committed=commit)
        failure = machine.failure
        machine.decided(commit)
        if machine.is_torn:
            raise AgentError(f"a peer's state was installed in part: {failure}; restart the group")
        if not commit:
            self._note_discard(failure or "another rank of the group voted no")
        return commit

    def _install(self) -> None:
        machine = self.machine
        assignment = machine.assignment
        if assignment is not None and machine.failure is None:
            self._guarded("installing a peer's state", lambda: self._healing.install(assignment, machine))

    def _vote(self) -> bool:
        """Without the decision a rank that voted yes cannot go on: the others may have committed. A rank that is alone
        in its group has made it."""
        vote, machine = self.machine.vote(), self.machine
        step = machine.assignment.max_step if machine.assignment else machine.step
        quorum_id = machine.assignment.quorum_id if machine.assignment else None
        if machine.has_decided:
            self._manager.tell(step, quorum_id=quorum_id, timeout_s=self._limit_s())
            return True
        try:
            with self.progress.waiting_for("vote"):
                return self._manager.vote(step, vote, quorum_id=quorum_id, timeout_s=self._limit_s())
        except LighthouseError as e:
            if not vote:
                return False
            raise AgentError(f"voted yes for step {step} and cannot learn the decision: {e}; restart the group") from e

    def _note_discard(self, reason: str) -> None:
        machine = self.machine
        log.warning("step %d discarded: %s", machine.step, reason)
        if machine.discards >= self._limits.discards:
            raise AgentError(f"{machine.discards} steps discarded in a row (max_consecutive_discards): {reason}")
