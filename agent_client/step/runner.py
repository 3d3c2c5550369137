"""Runs one step of a rank: requests the quorum, connects to the peers, heals, reduces and votes.

`prepare_step`, `reduce` and `reach_all` run on the background thread, in the order in which they were submitted.
`install_state` and `finish_step` run on the script's thread: `install_state` after `prepare_step`, and `finish_step`
last. The participants compare each collective before they run it (comparison.py).
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, first_line
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.healing import Healing
from agent_client.manager_client.client import ManagerConnection
from agent_client.progress.activity import Shape
from agent_client.progress.progress import Block, Progress
from agent_client.progress.rules import Entry
from agent_client.state.train_state import Scalers
from agent_client.step.comparison import Comparison, Part, StepAttempt, dtype_of_sum, is_half
from agent_client.step.config import AgentConfig
from agent_client.step.rendezvous import GroupPlace
from agent_client.step.rules.comparison import Flag, join_names
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.news import Loss, RetryPolicy, StepNews
from agent_client.step.script_check import may_skip
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.chaos import FaultKind
from lighthouse_protocol.messages.membership import PLAIN, Assignment
from lighthouse_protocol.messages.progress import HEAL
from lighthouse_protocol.refusals import LighthouseError

log = logging.getLogger(__name__)

T = TypeVar("T")

BUFFERS = "the buffers of the model; broadcast_buffers=False leaves them out"
RESTART = "restart the job from its last checkpoint"
SAMPLES_LOGGED = 64
LOSS_TIMEOUT_S = 0.25
"""Time in seconds that a discarded step waits for the lighthouse to name the lost group. The peers and the lighthouse
notice a loss at about the same time."""


@dataclass(eq=False)
class StepRunner:
    machine: StepMachine
    manager: ManagerConnection
    peers: Peers
    healing: Healing
    place: GroupPlace
    config: AgentConfig
    progress: Progress
    scalers: Scalers
    catch_up: CatchUpDriver | None = None

    def __post_init__(self) -> None:
        machine, manager, config = self.machine, self.manager, self.config
        self.last: Assignment | None = None
        self.samples: Callable[[], torch.Tensor] | None = None
        """Function that returns the sample indices of this rank's last batch. None if no StepSampler has drawn it."""
        self.requests_late = False
        """True if a step's quorum is requested when the step begins, instead of with the vote on the previous step. A
        group that heals in such a step contributes zeros, because it has computed nothing for the step."""
        self.attempt = StepAttempt(machine, manager, self.peers, config)
        self._retry_policy = RetryPolicy(config.max_consecutive_discards)
        self.comparison = Comparison(machine, manager, self.peers, self.attempt, config, self.progress)
        self._nonfinite = ""
        """Description of the gradient that was not finite in this step, or an empty string."""
        self._last_discard = ""
        self._news = StepNews()

    def prepare_step(self, reductions_before: int) -> None:
        """Request the quorum, connect to its participants, serve this rank's state, and heal if necessary.

        `reductions_before` is the number of reductions that the script has submitted before this step.
        """
        machine, comparison, attempt = self.machine, self.comparison, self.attempt
        attempt.failed_at, self._nonfinite = None, ""
        with self.progress.asking("quorum"):
            assignment = self._request_quorum()
        self._log_for_group(self._news.pop_overdue(time.monotonic()))
        if isinstance(assignment, LighthouseError):
            return machine.record_quorum_failure(str(assignment))
        machine.accept_assignment(assignment)
        self.progress.numbers.begin_quorum(assignment.quorum_id, reductions_before)
        log_quorum(self.last, assignment)
        is_first = self.last is None or self.last.quorum_id != assignment.quorum_id
        has_changed = is_first or (self.last is not None and self.last.contributors != assignment.contributors)
        self.last = assignment
        if is_first:
            machine.set_shares(())  # shares of another quorum may overlap with those of its participants
        comparison.begin_step(assignment, is_first=is_first)
        if self.catch_up is not None:
            self.catch_up.prepare_step(assignment)
            self.manager.asks_ahead = not assignment.catches_up
        if (reason := self._find_revocation(assignment)) is not None:
            return machine.fail_step(reason)
        if machine.has_no_heal_source and machine.distrust is not None:
            raise AgentError(f"{machine.distrust.text}; no other group has a state to heal from: {RESTART}")
        if machine.is_unhealed and machine.distrust is not None:
            # The other ranks in the group have already begun this step, so finish it and vote no.
            machine.fail_step(machine.distrust.text)
            self.peers.drop()
            self.healing.withdraw()
            return None
        with self.progress.asking("peers"):
            attempt.run(
                "making the process group",
                lambda: self.peers.configure(assignment, lambda: self._find_revocation(assignment)),
            )
            if comparison.is_on and machine.failure is None:
                compare = comparison.agree_on_options if is_first else lambda: comparison.compare_state(assignment)
                attempt.run("comparing", compare)
            can_share = self.config.share_by_speed and comparison.is_on and machine.failure is None
            is_due = has_changed or assignment.max_step >= comparison.shares_due
            if can_share and is_due and assignment.contributors <= machine.world_size.size:
                attempt.run("comparing speeds", lambda: comparison.agree_on_shares(assignment))
        if assignment.has_healing and not assignment.heals and machine.failure is None:
            healing = [assignment.replica_ids[place] for place in assignment.healing]
            line = self._news.heal_begins(assignment.max_step, healing, time.monotonic())
            self._log_for_group(line, logging.INFO)
        attempt.run("serving the state", lambda: self.healing.serve(assignment, machine))
        if not assignment.catches_up:
            self._heal(assignment)
        return None

    def _request_quorum(self) -> Assignment | LighthouseError:
        """Request the quorum, and retry while the manager is unreachable.

        If the manager refuses the request, return the error. The next step then sends another request. Raise AgentError
        if the manager has exited, or no later request can succeed.
        """
        retry_policy, manager_process = self._retry_policy, self.place.manager_process
        while True:
            try:
                assignment = self._request_once()
                retry_policy.reset()
                return assignment
            except LighthouseError as e:
                if reason := retry_policy.record_refusal(e, time.monotonic()):
                    raise AgentError(f"the manager at {self.manager.address} rejected this rank: {reason}") from e
                if manager_process is not None and not manager_process.is_alive:
                    raise AgentError("the group's manager ended; restart the group") from e
                is_alive = self.manager.check_alive(e)
                if news := retry_policy.pop_log_line(e, time.monotonic()):
                    log.error("step %d: %s", self.machine.step, news)
                time.sleep(retry_policy.backoff_s)
                if is_alive:
                    return e

    def _request_once(self) -> Assignment:
        """Request a quorum for this step.

        If the quorum has already been revoked, and the group has no other rank that may have begun the step, vote no
        and request the next quorum.
        """
        machine = self.machine
        while True:
            assignment = self.manager.ask(
                machine.step,
                self.healing.address,
                timeout_s=self.config.quorum_timeout_s,
                tag_quorum_id=machine.tag_quorum_id,
                commit_failures=machine.discards,
                catch_up=self.catch_up.request_fields() if self.catch_up is not None else PLAIN,
                distrust=machine.distrust,
                heals_first=None if self.requests_late else machine.heals_first,
            )
            if not machine.is_alone or self._find_revocation(assignment) is None:
                return assignment
            step, quorum_id = assignment.max_step, assignment.quorum_id
            self.manager.vote(step, False, quorum_id=quorum_id, timeout_s=self.config.timeout_s)
            machine.discards += 1

    def _find_revocation(self, assignment: Assignment) -> str | None:
        reason = self.manager.watch.revoked(assignment.quorum_id)
        if reason is None and assignment.revoked:
            reason = "reported with the quorum"
        return None if reason is None else f"quorum {assignment.quorum_id} was revoked: {reason}"

    def _heal(self, assignment: Assignment) -> None:
        machine = self.machine
        if machine.must_install and not machine.heals_first:
            log.warning(
                "step %d began with a state that differs from the peers'; healing before the next step", machine.step
            )
            if assignment.place is not None:
                reason = "the peers count on this group's gradients, which were computed from another state"
                self.attempt.fail("healing", reason)
            return
        with self.progress.busy(HEAL) if assignment.heals else nullcontext():
            self.attempt.run("healing", lambda: self.healing.fetch(assignment))

    # Autograd must not record the division, and results of inference mode can be changed only in inference mode.
    @torch.inference_mode()
    def reduce(
        self, tensor: torch.Tensor, within_group: bool, entry: Entry, name: str, following: Sequence[Part] = ()
    ) -> torch.Tensor:
        """Average `tensor` over the contributing groups, in place, and return it.

        With `within_group`, first average over the ranks in this group, even after a failure, because the other ranks
        are waiting in the same collective. `following` are the reductions that are certain to come directly after this
        one, and are announced together with it. `entry` is the reduction's entry in the progress report.

        If this raises, for example because the dtype cannot be averaged, the step fails, even if the script never looks
        at the result.
        """
        try:
            return self._reduce(tensor, within_group, entry, name, following)
        except Exception as e:
            self.machine.record_error(f"reducing{name and f' {name}'}: {first_line(e)}")
            self.peers.drop()
            raise

    def _reduce(
        self, tensor: torch.Tensor, within_group: bool, entry: Entry, name: str, following: Sequence[Part]
    ) -> torch.Tensor:
        group, divides_first = self.place.group, is_half(tensor.dtype)
        summed = in_order(tensor.to(dtype_of_sum(tensor.dtype, self.config.reduce_dtype)))
        if group is not None and within_group:
            if divides_first:
                summed /= self.place.group_world_size
            with self.collective(entry, "all_reduce", tensor.shape, within_group=True):
                self.attempt.run("reducing inside the group", lambda: group.all_reduce(summed, self.attempt.limit_s))
            if not divides_first:
                summed /= self.place.group_world_size
        contributes, skips_batch, flags = self.machine.contributes, self.machine.skips_batch, Flag.NONE
        if contributes and skips_batch:
            flags = Flag.SKIPS_BATCH
        elif contributes and self.comparison.checks_finite and not is_finite(self._with_fault(summed)):
            flags = Flag.NOT_FINITE
        if not contributes or skips_batch:
            summed.zero_()
        self._reduce_over_peers(summed, entry, name, flags, following, divides_first=divides_first)
        return tensor if summed is tensor else tensor.copy_(summed)

    def _with_fault(self, gradient: torch.Tensor) -> torch.Tensor:
        """Put a NaN into the gradient, in place, if `lighthouse chaos` has ordered this fault. Return the gradient."""
        watch = self.manager.watch
        if watch.has_fault(FaultKind.NAN) and gradient.is_floating_point() and gradient.numel():
            watch.end_fault(FaultKind.NAN)
            gradient.view(-1)[0] = math.nan
        return gradient

    def receive_from_first(self, packed: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Replace the content of `packed` with that of the first participant whose gradients count.

        `packed` is a one-dimensional uint8 tensor with the same length on all participants. The contents are summed,
        and all other participants contribute zeros. Byte 0 must be 1. If it is still 1 after the sum, exactly one
        participant has contributed.
        """
        machine = self.machine
        if not (machine.contributes and machine.share.is_first):
            packed.zero_()
        self._reduce_over_peers(packed, entry, BUFFERS, is_mean=False)
        if machine.failure is None and int(packed[0]) != 1:
            machine.fail_step(f"{int(packed[0])} participants sent values as the first participant")
        return packed

    @torch.inference_mode()  # as in reduce()
    def sum_over_group(self, tensor: torch.Tensor, entry: Entry) -> None:
        if self.place.group is not None:
            summed = in_order(tensor)
            with self.collective(entry, "all_reduce", tensor.shape, within_group=True):
                self.place.group.all_reduce(summed)
            if summed is not tensor:
                tensor.copy_(summed)

    def collective(self, entry: Entry, operation: str, shape: Shape = "", *, within_group: bool) -> Block:
        number = self.progress.numbers.number_of(entry, within_group=within_group)
        return self.progress.collective(number, operation, shape, within_group=within_group)

    def _reduce_over_peers(
        self,
        tensor: torch.Tensor,
        entry: Entry,
        name: str = "",
        flags: Flag = Flag.NONE,
        following: Sequence[Part] = (),
        *,
        is_mean: bool = True,
        divides_first: bool = False,
    ) -> None:
        machine, comparison = self.machine, self.comparison
        if machine.assignment is None or machine.failure is not None:
            return
        if divides_first:
            tensor /= self.machine.share.divisor
        with self.collective(entry, "all_reduce", tensor.shape, within_group=False):
            is_announced = comparison.is_next_announced(tensor, name)
            if not is_announced:
                wrong = comparison.announce_reduction(tensor, name, flags, following)
                if wrong is None or (wrong and not self._reject(name, wrong)):
                    return
            if not self.attempt.run("reducing", lambda: self.peers.all_reduce(tensor, self.attempt.limit_s)):
                return
            if is_announced and comparison.checks_finite and not is_finite(tensor):
                comparison.ahead.clear()  # all have the same sum, so all do this, and find the groups at fault
                wrong = comparison.announce_reduction(tensor, name, flags)
                if wrong is None or not self._reject(name, wrong):
                    return
        machine.record_reduction()
        if is_mean:
            if not divides_first:
                tensor /= max(1, machine.divisor)
            elif machine.divisor != machine.share.divisor:  # peers have announced since then that they skip a batch
                tensor *= machine.share.divisor / max(1, machine.divisor)
            if comparison.checks_finite and not comparison.is_on and not is_finite(tensor):
                self._reject(name)  # without a comparison, the group at fault is unknown

    def _reject(self, name: str, wrong: Sequence[str] = ()) -> bool:
        """Discard the step because the gradient `name` is not finite, unless a GradScaler may skip it.

        `wrong` contains the groups whose own gradients are not finite, and each of them reports this. If it is empty,
        only the mean is not finite, and the first group reports this. Return True if the step was not discarded.
        """
        if self.scalers.may_skip or may_skip():
            return True
        assignment = self.machine.assignment
        assert assignment is not None
        own = assignment.replica_ids[assignment.replica_rank]
        what = f"the gradient of {' and '.join(wrong)}" if wrong else "the mean"
        self._nonfinite = f"{what} is not finite" + (f" ({name})" if name else "") + self.samples_text()
        if own in (wrong or assignment.replica_ids[:1]):
            self.progress.activity.reject(assignment.max_step, cut_reason(self._nonfinite), is_own=bool(wrong))
        self.machine.record_error(self._nonfinite)
        return False

    def samples_text(self) -> str:
        if self.samples is None:
            return ""
        samples = self.samples().tolist()
        more = f" and {len(samples) - SAMPLES_LOGGED} more" if len(samples) > SAMPLES_LOGGED else ""
        return f"; samples here: {', '.join(map(str, samples[:SAMPLES_LOGGED]))}{more}"

    def reach_all(self) -> None:
        """Check before the vote that every participant has reached the end of the step.

        In the first step under a quorum, also check that all have run the same number of collectives. In later steps,
        run a collective only if nothing was reduced in the step. The next announcement then reveals a different number.
        """
        if self.comparison.compares_end and self.machine.failure is not None:
            self.peers.drop()  # disconnect, because the others are waiting in an exchange
        elif self.comparison.compares_end:
            with self.collective(self.progress.numbers.over(), "all_reduce", within_group=False):
                if self.comparison.compare_end():
                    self.machine.record_reduction()
        elif not self.machine.has_reduced:
            self._reduce_over_peers(torch.zeros(1), self.progress.numbers.over())

    # -- on the script's thread

    def finish_step(self) -> bool:
        self.comparison.end_step()
        if self.comparison.mismatch is not None:
            raise self.comparison.mismatch
        machine = self.machine
        commit = self._vote()
        self.healing.release(is_committed=commit)
        failure, assignment = machine.failure, machine.assignment
        if assignment is not None:
            self.progress.trace_decision(assignment.max_step, assignment.quorum_id, is_committed=commit)
        machine.record_decision(commit)
        if machine.is_installing:
            raise AgentError(f"a peer's state was installed only partly: {failure}; restart the group")
        if not commit:
            self._note_discard(failure or "another rank of the group voted no")
            if self._nonfinite and self.config.on_nonfinite == "raise":
                raise AgentError(f"step {machine.step}: {self._nonfinite} (on_nonfinite is 'raise')")
        elif machine.assignment is not None:
            step, participants = machine.assignment.max_step, machine.assignment.replica_ids
            for line in self._news.describe_commit(step, participants, time.monotonic()):
                self._log_for_group(line, logging.INFO)
        return commit

    def install_state(self) -> bool:
        machine = self.machine
        assignment = machine.assignment
        if assignment is None or machine.failure is not None or not machine.must_install:
            return False
        self.attempt.run("installing a peer's state", lambda: self.healing.install(machine))
        if machine.is_installing:
            raise AgentError(f"a peer's state was installed only partly: {machine.failure}; restart the group")
        return not machine.must_install

    def _vote(self) -> bool:
        """Vote, and return the decision.

        A rank that has voted yes cannot continue without the decision, because the other ranks may have committed the
        step. If the group has a single rank, its vote is the decision.
        """
        vote, machine = self.machine.vote(), self.machine
        step = machine.assignment.max_step if machine.assignment else machine.step
        quorum_id = machine.assignment.quorum_id if machine.assignment else None
        if machine.has_decided:
            self.manager.send_yes(step, quorum_id=quorum_id, timeout_s=self.attempt.limit_s)
            return True
        try:
            with self.progress.waiting_for("vote"):
                return self.manager.vote(step, vote, quorum_id=quorum_id, timeout_s=self.attempt.limit_s)
        except LighthouseError as e:
            if not vote:
                return False
            raise AgentError(f"voted yes for step {step} but cannot learn the decision: {e}; restart the group") from e

    def _note_discard(self, reason: str) -> None:
        machine, assignment = self.machine, self.machine.assignment
        lost = self._why_lost(assignment) if assignment is not None else None
        if lost is not None:
            failed_at = time.monotonic() if self.attempt.failed_at is None else self.attempt.failed_at
            return self._log_for_group(self._news.lost(Loss(*lost, machine.step, failed_at)))
        self._log_for_group(self._news.flush())
        text = f"step {machine.step} discarded: {reason}"
        # Without a quorum, the step is repeated immediately, and RetryPolicy logs what the rank is waiting for.
        is_news = assignment is not None or text != self._last_discard
        log.log(logging.WARNING if is_news else logging.DEBUG, "%s", text)
        self._last_discard = text
        if assignment is None or machine.is_blamed:
            return None
        waits_for_healing = assignment.has_healing and assignment.replica_rank not in assignment.healing
        if waits_for_healing and not machine.has_erred:
            return None  # the failure was in the other ranks' transfer
        machine.faults += 1
        if machine.faults >= self.config.max_consecutive_discards:
            names = ", ".join(assignment.replica_ids)
            raise AgentError(
                f"{machine.faults} steps discarded in a row (max_consecutive_discards): {reason}; quorum of {names}"
            )
        return None

    def _why_lost(self, assignment: Assignment) -> tuple[str, str] | None:
        if self.machine.has_erred or assignment.replica_world_size == 1:
            return None
        loss = self.manager.watch.why_lost(assignment.quorum_id, LOSS_TIMEOUT_S)
        if loss is None or loss.lost == assignment.replica_ids[assignment.replica_rank]:
            return None
        return loss.lost, loss.reason.removeprefix(f"{loss.lost}: ")

    def _log_for_group(self, line: str, level: int = logging.WARNING) -> None:
        """Log a line about the whole group: with `level` on rank 0, and with DEBUG on the others. Skip empty lines."""
        if line:
            log.log(level if self.manager.group_rank == 0 else logging.DEBUG, "%s", line)


def log_quorum(before: Assignment | None, now: Assignment) -> None:
    """Log the quorum, and the groups that have joined or left since `before`. Do nothing if it is the same quorum."""
    if before is not None and before.quorum_id == now.quorum_id:
        return
    known = frozenset(before.replica_ids if before is not None else now.replica_ids)
    admitted = [name for name in now.replica_ids if name not in known]
    gone = sorted(known - frozenset(now.replica_ids))
    text = f"{now.replica_world_size} {'group' if now.replica_world_size == 1 else 'groups'} from step {now.max_step}"
    text += f"; joined: {join_names(admitted)}" if admitted else ""
    text += f"; without: {join_names(gone)}" if gone else ""
    log.info("quorum %d: %s", now.quorum_id, text)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a contiguous copy if its memory has gaps or another order, because gloo ignores strides."""
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    values = tensor._values() if tensor.is_sparse else tensor
    if not (values.is_floating_point() or values.is_complex()):
        return True
    has_half = values.is_floating_point() and values.itemsize < torch.float32.itemsize
    total = values.sum(dtype=torch.float32 if has_half else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())  # a sum of finite elements may overflow


class ReductionFuture(Future[torch.Tensor]):
    """Future of a reduction. The time spent waiting for it does not count as compute time."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def result(self, timeout: float | None = None) -> torch.Tensor:
        if self.done():
            return super().result(timeout)
        self._progress.enter_reduction()
        try:
            return super().result(timeout)
        finally:
            self._progress.leave_reduction()


class BackgroundThread:
    """Runs tasks in order on a daemon thread, which does not prevent the interpreter from exiting."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T], done: "Future[T] | None" = None) -> "Future[T]":
        """Queue `task`, and return the future of its result, which is `done` if given.

        The future cannot be cancelled, because the other ranks expect the task to run. After `close`, no task runs, and
        the future fails with AgentError.
        """
        done = Future() if done is None else done
        done.set_running_or_notify_cancel()
        with self._lock:
            if not self._is_closed:
                self._unfinished += 1
                self._tasks.put((task, done))
                return done
        done.set_exception(AgentError("the Agent was closed; create another one with Agent.from_env"))
        return done

    @property
    def is_idle(self) -> bool:
        """True if no task is queued or running. The last task's future may complete slightly later."""
        return self._unfinished == 0

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._is_closed = True
            self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, done = entry
            resolve: Callable[[Any], None]
            try:
                resolve, outcome = done.set_result, task()
            except BaseException as e:  # noqa: BLE001  the caller receives it through the future
                resolve, outcome = done.set_exception, e
            with self._lock:
                self._unfinished -= 1
            resolve(outcome)
            del entry, task, done, resolve, outcome
