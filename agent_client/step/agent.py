"""The Agent, through which a training script takes part in its job. There is one per rank.

It requests quorums, heals, reduces and votes. Everything in a step except the vote runs on one background thread, in
order: the quorum, the process group, the transfer of state, the collectives. So the quorum overlaps the forward pass,
and the first collective waits for it.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch

from agent_client.collectives.nccl import in_stream_order
from agent_client.collectives.observed import never_compiled
from agent_client.errors import AgentError, ConfigurationError, GroupDrained, first_line
from agent_client.manager_client.client import ExitReport
from agent_client.progress.progress import Block
from agent_client.state.digest import Digests
from agent_client.state.shards import is_sharded
from agent_client.state.train_state import Scalers, TrainState
from agent_client.step.config import DEFAULTS, AgentConfig, AgentOptions, config_of
from agent_client.step.environment import Environment
from agent_client.step.evaluation import Evaluation, RankRounds, check_equal
from agent_client.step.internals import ALONE, GroupPlace, Internals, make_parts
from agent_client.step.observer import give_way
from agent_client.step.rendezvous import rendezvous
from agent_client.step.rules.comparison import DataChoice, DataUses
from agent_client.step.rules.loop_order import StepPart
from agent_client.step.rules.machine import Applying, Phase
from agent_client.step.rules.world_size import WorldSizeMode
from agent_client.step.runner import Part, StepDigest
from agent_client.step.script_check import (
    OptimizerWatch,
    may_skip,
    refuse_live_objects,
    refuse_optimizer,
    warn_of_split_samplers,
)
from agent_client.step.stop_signals import StopSignals, close_at_end, close_attached, uninterrupted, was_closed
from lighthouse_protocol.limits import MAX_COUNT
from lighthouse_protocol.messages.membership import DistrustKind, Tag, World
from lighthouse_protocol.messages.progress import DataUse

log = logging.getLogger(__name__)


T = TypeVar("T")

APPLY_HINT = (
    "this rank's state is inconsistent: it heals before its gradients count again. A script that catches errors of "
    "optimizer.step() may go on; one that skips a committed step must not: vote no before (agent.report_error)"
)

LEFT_OUT = "the script has left it out: a forward pass was followed by no backward pass"
UNVOTED = "the script has not voted on it: a forward pass follows, and the averaged gradients are gone"
SKIP_HINT = (
    "A script that leaves out a batch calls agent.skip_batch(reason) in place of the backward pass, and steps its "
    "optimizer as always: then its peers lose nothing but that batch"
)


class Agent:
    """A rank's connection to its replica group and to the other groups. Create it with `Agent.from_env`.

    A step begins with a quorum: the list of replica groups that do it together. The Agent averages gradients over these
    groups, and all of them commit the step or discard it. If this group has fallen behind, the Agent first copies the
    state of a peer. `DistributedDataParallel` and `FaultTolerantOptimizer` call the methods for a step; only a loop of
    another kind calls `start_quorum`, `all_reduce` and `should_commit` itself.

    An Agent is a context manager: leaving the block reports an exception and closes it.

    Example:
        ```python
        from agent_client import Agent, DistributedDataParallel, FaultTolerantOptimizer, StepSampler, TrainState

        with Agent.from_env(state=TrainState(model, sgd)) as agent:
            replicated = DistributedDataParallel(model, agent)
            optimizer = FaultTolerantOptimizer(sgd, agent)
            for batch in StepSampler(len(labels), 64, agent, steps=1000):
                optimizer.zero_grad()
                loss_fn(replicated(images[batch]), labels[batch]).backward()
                optimizer.step()
        ```

    Attributes:
        state: The TrainState.
        group_rank: Rank of this process inside its replica group.
        group_world_size: Number of ranks in the replica group.
    """

    @uninterrupted
    def __init__(
        self,
        manager_address: str,
        *,
        state: TrainState,
        config: AgentConfig = DEFAULTS,
        place: GroupPlace = ALONE,
    ) -> None:
        """Start the background thread, and serve this rank's state. Scripts call `from_env` instead.

        Args:
            manager_address: host:port of the group's manager.
            state: The state that a healing peer copies.
            config: The options.
            place: Position of this rank in its replica group.

        Raises:
            ConfigurationError: The state or an option does not fit. Nothing is left open.
        """
        for optimizer in (state.optimizer, *state.others.values()):
            refuse_optimizer(optimizer)
        self.state = state
        self._is_checked = self._is_sendable = False
        self.group_rank, self.group_world_size = place.group_rank, place.group_world_size
        parts = make_parts(manager_address, state, config, place)
        give_way()
        self._place = place
        self._machine, self._runner, self._thread = parts.machine, parts.runner, parts.thread
        self._manager, self._peers, self._healing = parts.manager, parts.peers, parts.healing
        self._catch_up, self._progress = parts.catch_up, parts.progress
        self._exit_report = ExitReport(self._manager.report)
        self._exit_report.install()
        self._stop_signals = StopSignals(self._manager.drain, lambda: self._manager.is_watched, self.group_rank)
        self._quorum: Future[None] | None = None
        """Done when the quorum is known, its process group exists and a peer's state has arrived."""
        self._parts: list[StepPart] = []
        self._on_commit: list[Callable[[int], object]] = []
        self._uncalled_commit: int | None = None
        """Committed step whose callbacks have not been called."""
        self._began_late = False
        self._begun_version = 0
        self._drawn: tuple[int, set[int]] = (-1, set())
        self._state_digests, self._gradient_digests = Digests(), Digests()
        self._applying, self._scalers = Applying(), Scalers(state)
        self._data_uses = DataUses()
        self._progress.own.data = self._data_use
        self._has_looked_at_samplers = False
        self._optimizers = OptimizerWatch(state, self._applying)
        self._runner.leaves_to_scaler = lambda: self._scalers.may_skip or may_skip()
        self._rounds = RankRounds(self._runner, self._thread, self._peers, place.group, place.group_rank)
        self._evaluation = Evaluation(self._rounds, state, self._machine, self._progress, lambda: self.holds_state)
        self.internals = Internals(parts, place, config.timeout_s, self._wait_first_quorum)
        """Methods for the modules and optimizers of agent_client.training, not for scripts."""
        close_at_end(self)
        if place.presence is not None:
            self._manager.open()

    @classmethod
    def from_env(cls, *, state: TrainState, **options: Unpack[AgentOptions]) -> Self:
        """Create the Agent of this rank from its environment.

        The manager, the replica group and the rank's position in it come from environment variables
        (docs/reference/options.md). With only LIGHTHOUSE_ADDRESS and REPLICA_GROUP_ID set, rank 0 starts the group's
        manager. Unless `lighthouse-manager run` supervises the rank, SIGTERM, SIGHUP and SIGQUIT drain the group
        (GroupDrained); signals that the script handles itself stay with the script.

        Args:
            state: The state that a healing peer copies.
            **options: Fields of AgentConfig.

        Returns:
            An Agent that is connected to the other ranks of its group and has no quorum yet.

        Raises:
            ConfigurationError: An option or a variable does not fit; the message names it. Nothing was started.
            AgentError: The group's store or manager does not answer.
        """
        config = config_of(options)
        env = Environment.read()
        config = replace(config, advertise=config.advertise or env.advertise)
        give_way()
        address, place = rendezvous(env, config)
        with place.presence or contextlib.nullcontext():
            agent = cls(address, state=state, config=config, place=place)
        if not env.is_supervised:
            agent._stop_signals.install()
        return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._exit_report.send(e)
        self.close()

    @uninterrupted
    def close(self) -> None:
        """Leave the job: close the connections and, if this rank started it, the manager.

        It waits for peers that are still in this rank's last step, and for the other ranks of its group to finish. The
        interpreter's exit closes an Agent that is still open.
        """
        was_closed(self)
        self._optimizers.close()
        self._exit_report.uninstall()
        self._stop_signals.uninstall()
        self._manager.close(self._machine.next_step)
        self._peers.drop()
        if self._catch_up is not None:
            self._catch_up.close()
        self._thread.close(5.0)
        self._peers.close()
        self._healing.close()
        if self._place.group is not None:
            self._place.group.abort()
        if self._place.manager_process is not None:
            self._place.manager_process.stop()
        close_attached(self)

    # -- properties: none of them waits, and none changes a step

    @property
    def current_step(self) -> int:
        """Number of committed steps. During a step, the number of that step."""
        return self._machine.step

    @property
    def has_computed(self) -> bool:
        """Whether the step in progress has computed anything."""
        return self._machine.has_computed

    @property
    def has_failed(self) -> bool:
        """Whether the step in progress can no longer be committed, because a peer was lost or an error reported."""
        return self._machine.failure is not None

    @property
    def steps_ended(self) -> int:
        """Number of steps that this rank has voted on, committed or discarded."""
        return self._machine.ended

    @property
    def moves(self) -> int:
        """Counter of training forward passes, reductions and votes."""
        return self._machine.moves

    @property
    def accumulates(self) -> bool:
        """Whether the last forward pass was under `no_sync()`."""
        return self._machine.accumulates

    @property
    def was_committed(self) -> bool:
        """Whether the last step was committed, and the next one has not computed anything yet."""
        return self._machine.was_committed and not self._machine.has_computed

    @property
    def batches_committed(self) -> int:
        """Number of batches in the committed steps, over all replica groups."""
        return self._machine.batches_committed

    @property
    def quorum_id(self) -> int:
        """Id of the last quorum; 0 before the first."""
        return self._runner.last.quorum_id if self._runner.last else 0

    @property
    def participants(self) -> tuple[str, ...]:
        """Replica IDs of the last quorum, by replica_rank."""
        return self._runner.last.replica_ids if self._runner.last else ()

    @property
    def num_participants(self) -> int:
        """Number of replica groups in the last quorum."""
        return len(self.participants)

    @property
    def world(self) -> World:
        """Ranks of all replica groups, including groups that have not joined yet, as last received from the manager.

        Reading it costs nothing.
        """
        groups = max(1, self.num_participants)
        return self._manager.world or World(groups * self.group_world_size, groups, 0, self.group_world_size)

    @property
    def peers_pending(self) -> bool:
        """Whether a replica group is waiting to join the next quorum. Reading it costs nothing."""
        return self.world.peers_pending > 0

    @property
    def last_reconfiguration_s(self) -> float:
        """Seconds that the last change of the process group took, from closing the old one to the new one."""
        return self._peers.last_reconfiguration_s

    @property
    def world_size_mode(self) -> WorldSizeMode:
        """Which batches a step consists of."""
        return self._machine.world_size.mode

    @property
    def catches_up(self) -> bool:
        """Whether this rank is catching up: it computes with an older state than its peers (`heal_mode="catch_up"`)."""
        return self._catch_up is not None and self._catch_up.machine.follows

    @property
    def holds_state(self) -> bool:
        """Whether this rank holds the complete state of `current_step`."""
        return not (self.catches_up or self._machine.is_torn)

    @property
    def tag(self) -> Tag:
        """Name of this rank's state: its step, and the ID of the quorum that committed it."""
        return self._machine.tag

    @property
    def has_peers(self) -> bool:
        """Whether the quorum of the step in progress has other groups. The quorum must be known."""
        assignment = self._machine.assignment
        return assignment is not None and assignment.replica_world_size > 1

    @property
    def forward_begins(self) -> bool:
        """Whether a forward pass will begin the next step."""
        return any(part.begins_steps for part in self._parts)

    def data_report(self) -> dict[str, int | bool]:
        """Return how much of the data set was used, and whether each sample was used once per epoch.

        Returns:
            An empty dict before the first batch of a StepSampler or StepLoader. After it, `length`, `batch_size`,
            `accumulate` and `seed` of the sampler; `samples`, the number used by committed steps over all groups;
            `epoch` and `position`, the complete epochs and the samples of the present one; `irregular_steps`, the
            number of steps that this rank committed with batches drawn under another quorum, or not drawn; `is_exact`,
            True if there are none and the sampler has not changed, so each sample was used `epoch` or `epoch + 1`
            times.
        """
        return self._data_uses.report(self.batches_committed * self.group_world_size)

    def _data_use(self) -> DataUse | None:
        """Return the data report for `lighthouse status`."""
        report = self.data_report()
        if not report:
            return None
        return DataUse(report["length"], report["samples"], report["irregular_steps"], bool(report["is_exact"]))

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, for the script's own checkpoint.

        Returns:
            `step`, `tag_quorum_id` and `batches_committed`, all int. The sampler's position follows from the step.

        Raises:
            AgentError: This rank has to heal before it holds a state again.
        """
        tag, batches = self._machine.tag, self._machine.batches_committed
        if self._machine.distrust is not None:
            raise AgentError(f"state_dict: {self._machine.distrust.text}; do not save this state before it heals")
        if self._catch_up is not None:
            tag, batches = self._catch_up.held
        return {"step": tag.step, "tag_quorum_id": tag.quorum_id, "batches_committed": batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint. Load its model and optimizer first, between two steps.

        Args:
            state_dict: The value that `state_dict` returned.

        Raises:
            AgentError: A step is in progress, or an entry is no count.
        """
        if self._machine.phase is not Phase.IDLE:
            raise AgentError(f"load_state_dict: a step is under way ({self._machine.phase}); call it between two steps")
        for entry in ("step", "tag_quorum_id", "batches_committed"):
            if not 0 <= (value := state_dict[entry] or 0) < MAX_COUNT:
                raise AgentError(f"agent['{entry}'] of the checkpoint is {value}, not a number from 0 to below 2^53")
        self._machine.installed(state_dict["step"], state_dict["tag_quorum_id"], state_dict["batches_committed"])
        self._scalers.forget()

    # -- where this rank is, for `lighthouse ranks`

    def phase(self, name: str, total: int | None = None) -> Block:
        """Name a part of the script's work, such as "validation", while the block runs.

        Phases nest. If a phase makes no progress for much longer than before, the rank is reported as behind
        (docs/how-to/find-a-hang.md).

        Args:
            name: Name for `lighthouse ranks`.
            total: Number of ticks that the phase will have, or None if unknown.

        Returns:
            A context manager.

        Example:
            ```python
            with agent.phase("validation", total=len(batches)):
                for batch in batches:
                    validate(batch)
                    agent.tick()
            ```
        """
        return self._progress.phase(name, total)

    def tick(self) -> None:
        """Report that one more batch, file or request of the innermost phase is done."""
        self._progress.tick()

    def waiting_for(self, what: str) -> Block:
        """Declare that this rank waits for others while the block runs, so it is never reported as behind.

        Args:
            what: Name of the awaited event, for `lighthouse ranks`.

        Returns:
            A context manager.
        """
        return self._progress.waiting_for(what)

    # -- the batches of a step

    @property
    def is_participating(self) -> bool:
        """Whether this rank's gradients count in the step in progress. Waits for the quorum."""
        self.wait_quorum()
        return self._machine.contributes

    @property
    def quorum_step(self) -> int | None:
        """Number of the step in progress, the same in all groups, or None without a quorum. Waits for the quorum.

        It differs from `current_step` while this rank heals. Use it to choose a turn, such as that of a GAN.
        """
        self.wait_quorum()
        return self._machine.assignment.max_step if self._machine.assignment else None

    @never_compiled
    def slots(self) -> list[tuple[int, int]]:
        """Begin the step if necessary, and return which microbatches of it this rank computes.

        It waits for the quorum, which is known at once unless a group comes or goes. In CONSTANT_BATCH mode there may
        be several microbatches, otherwise there is one. A group whose gradients do not count also has one.

        Returns:
            (index, number of microbatches in the step) for each microbatch of this rank. Use them to shard data.
        """
        self.start_quorum()
        self.wait_quorum()
        return self._machine.share.slots(self.group_rank, self.group_world_size)

    def slot(self) -> tuple[int, int]:
        """Return the single entry of `slots()`.

        Raises:
            ConfigurationError: In CONSTANT_BATCH mode, in which there may be several.
        """
        if self.world_size_mode is WorldSizeMode.CONSTANT_BATCH:
            raise ConfigurationError(
                "constant_batch: a step may have several microbatches; see microbatches(), slots()"
            )
        [slot] = self.slots()
        return slot

    # -- one step

    @never_compiled
    def start_quorum(self) -> None:
        """Begin a step by requesting its quorum. Further calls in the same step do nothing.

        After a committed step the request runs in the background. If this rank may have to heal, the call waits for the
        quorum and returns with the state of a peer installed. A loop need not call it: a forward pass of the wrapped
        model, `all_reduce` and `should_commit` also begin a step. Call it before the script computes anything that
        depends on the state, because a computation before the call does not count in a step in which this rank heals.

        Raises:
            GroupDrained: The group was drained and has done its last step.
            AgentError: The state of a peer does not fit, or no peer can provide one.
        """
        if self._machine.is_in_backward and not _is_in_backward():
            self.should_commit()
        self._start(has_computed=_is_in_backward())

    @never_compiled
    def wait_quorum(self) -> None:
        """Wait until the quorum of this step is known, its process group connected and a peer's state received.

        Raises:
            GroupDrained: The group was drained and has done its last step.
            AgentError: This rank cannot get a quorum.
        """
        if self._quorum is not None:
            self._await("quorum", self._quorum)

    @never_compiled
    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        within_group: bool = True,
        name: str = "",
        followed_by: Sequence[Part] = (),
    ) -> "Future[torch.Tensor]":
        """Average a tensor over the contributing groups, in place, in the background.

        If a peer is lost, the future still completes; the step is discarded, and the content of `tensor` is undefined.

        Args:
            tensor: Tensor of any shape with a floating-point dtype, on a device that the process group supports. All
                groups must use the same number of elements and dtype, in the same order of calls.
            within_group: Whether to average over the ranks of the replica group as well. False for shards.
            name: Name of the tensor, for error messages. All groups must use the same name.
            followed_by: What is reduced next for certain, in this order and with nothing in between: the groups
                compare it together with this one.

        Returns:
            A future of `tensor`.
        """
        self._start(has_computed=True)
        self._machine.computes()
        entry, runner = self._progress.numbers.over(), self._runner
        rest = followed_by if len(self._parts) < 2 else ()  # the buckets of two modules may come mixed
        return self._thread.submit(
            in_stream_order(tensor, lambda: runner.reduce(tensor, within_group, entry, name, rest))
        )

    @never_compiled
    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks of this replica group, in place. All ranks of the group must call it.

        Args:
            tensor: Tensor with the same shape, dtype and kind of device at all ranks of the group.

        Returns:
            `tensor`.

        Raises:
            RuntimeError: A rank of the group was lost.
        """
        if self._place.group is not None:
            entry = self._progress.numbers.inside()
            self._thread.submit(lambda: self._runner.sum_over_group(tensor, entry)).result()
        return tensor

    @never_compiled
    def skip_batch(self, reason: str) -> None:
        """Skip this rank's batch. Call it instead of the backward pass, and step the optimizer as usual.

        The step then uses the mean of the other groups' gradients. In a group of several ranks the batch counts as
        zeros in the mean of its group. If some gradients have been reduced already, or several modules use the Agent,
        the step is discarded instead.

        Args:
            reason: Reason for the log. The log also has the sample indices if they come from a StepSampler.
        """
        self.start_quorum()
        self.wait_quorum()
        log.warning("step %d: %s; batch skipped%s", self.current_step, reason, self._runner.samples_text())
        if not self._contribute_nothing():
            self.report_error(f"a batch was skipped: {reason}")

    @never_compiled
    def report_error(self, error: BaseException | str) -> None:
        """Discard the step in progress, in all groups.

        Args:
            error: Reason for the log.
        """
        reason = str(error)
        self._thread.submit(lambda: self._machine.erred(reason)).result()

    @never_compiled
    def should_commit(self) -> bool:
        """Vote on the step, and wait for the decision.

        Returns:
            True if the step is committed: apply the gradients now. False if it is discarded: leave parameters and
            optimizer as they are.

        Raises:
            ScriptMismatch: The other groups do something else in this step.
            AgentError: `max_consecutive_discards` was reached, or this rank voted yes and cannot learn the decision.
        """
        if self._machine.phase is Phase.VOTED:
            raise AgentError(
                "the outcome of this rank's last vote is unknown, so it cannot vote on another step; "
                "end this process so that its group restarts: see the first error for the cause"
            )
        if self._machine.is_in_backward:
            self._give_up()
        self._start(has_computed=True)
        self._check_script()
        reduce_again = self.internals.reduce_again
        while not (is_committed := self._end_attempt()) and reduce_again and self._machine.is_salvageable:
            self._request_quorum()
            self.wait_quorum()
            reduce_again()
        for part in self._parts:
            part.settle(is_committed=is_committed)
        self._uncalled_commit = self._machine.step if is_committed else None
        if is_committed:
            self._note_data()
        if self._began_late and self._machine.was_told_late:
            self.start_quorum()  # a loop that begins its steps by a reduction would be late in the next one, too
        return is_committed

    @contextlib.contextmanager
    def applying(self) -> Generator[None]:
        """Enclose the code that applies a committed step, if the script does not use an optimizer of this package.

        If an exception leaves the block, this rank heals before its gradients count again. FaultTolerantOptimizer,
        LocalSGD and DiLoCo use it themselves.

        Returns:
            A context manager.

        Example:
            ```python
            if agent.should_commit():
                with agent.applying():
                    sgd.step()
            ```
        """
        self._applying.entered()
        try:
            yield
        except BaseException as e:
            text = f"step {self._machine.step - 1} was committed and not applied: {type(e).__name__}: {first_line(e)}"
            self._tear(text)
            raise
        self._applying.left()

    def on_commit(self, callback: Callable[[int], object]) -> None:
        """Register a function that is called after each committed step, and never after a discarded one.

        It runs on the script's thread, after FaultTolerantOptimizer has applied the step. If the script applies steps
        itself, it runs when the next step begins. On a rank that catches up (`catches_up`) the step is not applied yet.
        An exception in the callback leaves `optimizer.step()`.

        Args:
            callback: Called with `current_step`, counted from 1.
        """
        self._on_commit.append(callback)

    # -- between two steps, all ranks together

    def evaluate_on_rank0(
        self,
        evaluate: Callable[[], T],
        *,
        what: str = "validation",
        whole_group: bool | None = None,
        within_s: float = 86400.0,
    ) -> T:
        """Evaluate on rank 0, and return the result at all ranks.

        All ranks call it between two steps, at the same `current_step`. Rank 0 is group rank 0 of the first replica
        group that holds the newest state. The other ranks wait; none is dropped while rank 0 makes progress.

        Args:
            evaluate: Function without arguments, for the plain model. Returns numbers, text, tensors of any shape
                and dtype, and dicts, lists and tuples of these.
            what: Name of the evaluation in logs and in `lighthouse ranks`.
            whole_group: Whether all ranks of that replica group evaluate. None means yes if the state is sharded.
            within_s: Maximum seconds.

        Returns:
            The result of `evaluate` on rank 0, with tensors on the CPU.

        Raises:
            Exception: At an evaluating rank, the error of `evaluate`.
            EvaluationFailed: At the other ranks, with the name and text of that error.
            EvaluationInterrupted: A rank was lost. Training can continue with the next step.
            RankMismatch: The ranks do not call the same evaluation.
            ConfigurationError: `whole_group` is False and the state is sharded.
            AgentError: A step is in progress.

        Example:
            ```python
            if optimizer.step() and agent.current_step % 500 == 0:
                metrics = agent.evaluate_on_rank0(lambda: validate(model))
            ```
        """
        return self._evaluation.run(evaluate, what, whole_group, within_s)

    def check_equal(self, what: str, value: object, *, within_s: float = 600.0) -> None:
        """Check that a value is the same at all ranks.

        All ranks call it before their first step or between two steps. A group that joins while others train compares
        the value inside itself only.

        Args:
            what: Name of the value.
            value: A number or text. Its `repr` is compared, at most 1000 characters with the name.
            within_s: Maximum seconds.

        Raises:
            RankMismatch: The values differ. Raised at all ranks; the message lists the values and their ranks.
            EvaluationInterrupted: A rank was lost.
            ConfigurationError: The value is too long.
            AgentError: A step is in progress.
        """
        check_equal(self._rounds, what, value, within_s, self._wait_first_quorum)

    # -- for modules, optimizers and samplers

    @never_compiled
    def drew(self, at: int, batch: Callable[[], torch.Tensor]) -> bool:
        """Record which samples this rank trains on next. Samplers call it.

        Args:
            at: Number of the batch.
            batch: Returns the indices of its samples.

        Returns:
            False if the step of this batch had been left out and is discarded now.
        """
        machine = self._machine
        if self._drawn[0] != machine.ended:
            self._drawn = machine.ended, set()
        is_again, is_begun = at in self._drawn[1], machine.phase is not Phase.IDLE and machine.has_computed
        self._drawn[1].add(at)
        left_out = is_again and is_begun and not machine.is_in_backward and self._discard_redrawn()
        self._runner.samples = batch
        return not left_out

    def add_part(self, part: StepPart) -> None:
        """Make `part` belong to every step from now on."""
        self._parts.append(part)

    @never_compiled
    def computes(self, part: StepPart, *, accumulates: bool = False) -> None:
        """Note that a forward pass of `part` begins, and begin the step if none is in progress.

        If the pass shows that the script has left out the current step, discard that step first.
        """
        self._discard_if_left_out(part, accumulates=accumulates)
        self.start_quorum()
        self._sync_order(part)
        if not accumulates:
            part.order.forward()
        self._machine.computes(accumulates=accumulates)

    @never_compiled
    def backward_reduces(self) -> None:
        """Note that a backward pass reduces. `backward_ended` follows, unless the pass is abandoned."""
        self._machine.is_in_backward = True

    @never_compiled
    def backward_ended(self) -> None:
        """Note that a backward pass has reduced all of its gradients."""
        self._machine.is_in_backward = False

    @never_compiled
    def take_from_first(self, packed: torch.Tensor) -> "Future[torch.Tensor]":
        """Replace a tensor by that of the first participant that counts, in place.

        Args:
            packed: One-dimensional uint8 tensor, with the same length at all participants. Byte 0 is 1 at every caller.

        Returns:
            A future of `packed`.
        """
        entry = self._progress.numbers.over()
        return self._thread.submit(in_stream_order(packed, lambda: self._runner.take_from_first(packed, entry)))

    def draws_from(self, data: DataChoice, *, is_whole_step: bool = True) -> None:
        """Note the source of the current step's batches. The quorum of the step is known.

        Args:
            data: Source of the batches, which must be the same at the peers.
            is_whole_step: Whether the step has no other batches of this rank.
        """
        self._runner.data = data
        if is_whole_step:
            self._data_uses.drawn(data, self._machine.step, self.quorum_id)

    @never_compiled
    def tell_commit(self) -> None:
        """Call the functions of `on_commit` once, after the last committed step is applied. For optimizers."""
        step, self._uncalled_commit = self._uncalled_commit, None
        if step is not None:
            for callback in self._on_commit:
                callback(step)

    # -- within

    def _wait_first_quorum(self) -> None:
        if self._runner.last is None:
            self.start_quorum()
            self.wait_quorum()

    def _await(self, what: str, done: "Future[T]") -> T:
        if done.done():
            return done.result()
        with self._progress.waiting_for(what):
            return done.result()

    def _start(self, *, has_computed: bool) -> None:
        """Begin a step if none is in progress.

        Args:
            has_computed: Whether the script has computed before. A peer's state must not arrive then.
        """
        if self._machine.phase is not Phase.IDLE:
            return
        if wrong := self._applying.begins(may_skip):
            self._tear(wrong)
        self.tell_commit()
        self._began_late, heals_first = has_computed, self._may_heal and not has_computed
        if not self._machine.was_committed and not has_computed:  # the loss may be scaled already
            self._scalers.take_back()
        self._begin_with_state()
        self._request_quorum(heals_first=heals_first)
        if heals_first:
            self._heal_first()
        elif self.state.moves_in_forward and not has_computed:
            self.wait_quorum()  # then the copy for a peer is complete

    @property
    def _may_heal(self) -> bool:
        """True if the next quorum may require this rank to heal. It must then wait for it before it computes."""
        machine = self._machine
        return self.internals.asks_late or machine.may_heal or machine.tag_quorum_id is None or self.catches_up

    def _begin_with_state(self) -> None:
        if self._catch_up is not None:
            self._catch_up.begin_step()
        self.state.begin_step()
        if self._machine.was_committed and not self._is_sendable:
            self.state.check_sendable()
            self._is_sendable = True
        self._scalers.begin_step()
        self._runner.digest = self._digest_state()
        self._progress.step(self._machine.step)
        self._machine.begin()
        self._begun_version = self._state_version()

    def _state_version(self) -> int:
        """Return a number that changes when the script moves the parameters."""
        first = next(iter(self.state.model.parameters()), None)
        return 0 if first is None else first._version

    def _heal_first(self) -> None:
        try:
            self.wait_quorum()
            if self._runner.install():
                self._begin_with_state()
        except GroupDrained:
            raise
        except AgentError as e:
            self._exit_report.send(e)  # before the peers notice closed connections
            self._peers.drop()
            raise

    def _request_quorum(self, *, heals_first: bool = False) -> None:
        self._machine.ask(heals_first=heals_first)
        self._quorum = self._thread.submit(lambda n=self._progress.numbers.over_groups: self._runner.begin(n))

    def _check_script(self) -> None:
        """Check the script before a vote.

        Raises:
            ConfigurationError: Something would make the groups differ.
        """
        if not self._is_checked:
            refuse_live_objects(self.state, has_reduced=self._progress.numbers.over_groups > 0)
            self._is_checked = True
        if not self.internals.asks_late and (moved := self.state.find_moved()):
            self.internals.refuse_catch_up(f"{moved}, which changes in the forward pass")
            log.info("%s changes in the forward pass, so each forward pass now waits for its quorum", moved)
            assignment = self._machine.assignment
            if assignment is not None and assignment.has_healing and not assignment.heals:
                self.report_error(f"{moved} changed in the forward pass while a peer read it")

    def _end_attempt(self) -> bool:
        """Return whether the step was committed under the quorum that was requested last."""
        self.wait_quorum()
        for part in self._parts:
            part.agree()
        if self._runner.compares_end or not (self._machine.has_reduced and self._thread.is_idle):
            self._await("peers", self._thread.submit(self._runner.reach_all))
        if self._runner.compares_gradients:
            self._compare_gradients()
        is_committed = self._runner.finish()
        if is_committed:
            self._applying.committed(self._machine.step - 1)
        return is_committed

    def _discard_if_left_out(self, part: StepPart, *, accumulates: bool) -> None:
        machine, order = self._machine, part.order
        self._sync_order(part)
        if machine.phase is Phase.IDLE or machine.is_in_backward or _is_in_backward():
            return
        if order.has_reduced:
            if self._starts_over() and order.starts_over():
                self._discard_left_out(UNVOTED)
        elif not accumulates and part.has_abandoned and order.repeats():
            self._discard_left_out(LEFT_OUT)

    def _sync_order(self, part: StepPart) -> None:
        machine = self._machine
        part.order.sync(step=machine.step, ended=machine.ended, was_committed=machine.was_committed)

    def _discard_redrawn(self) -> bool:
        """Discard the step if a redrawn batch shows that the script has left it out.

        Returns:
            Whether the step was left out.
        """
        for part in self._parts:
            self._sync_order(part)
        if not any(part.order.has_reduced for part in self._parts):
            is_left_out, reason = bool(self._parts), LEFT_OUT
        else:
            is_left_out, reason = self._starts_over(), UNVOTED
        if is_left_out:
            self._discard_left_out(reason)
        return is_left_out

    def _discard_left_out(self, reason: str) -> None:
        if reason is UNVOTED or self._contribute_nothing():
            self._finish_with_peers()
        self.report_error(f"{reason}{self._runner.samples_text()}. {SKIP_HINT}")
        self.should_commit()
        for part in self._parts:
            part.order.gave_up()

    def _finish_with_peers(self) -> None:
        """Take part in everything that the peers wait for in this step, since they may commit it."""
        for part in self._parts:
            part.agree()
        if self._runner.compares_end:
            self._await("peers", self._thread.submit(self._runner.reach_all))
            self._runner.compares_end = False

    def _starts_over(self) -> bool:
        """Check whether the gradients reduced in this step are gone, and no GradScaler has skipped the step.

        A loop that accumulates still has them, and SAM has moved the parameters.
        """
        reduced = [part for part in self._parts if part.order.has_reduced]
        gradients = (parameter.grad for part in reduced for parameter in part.parameters_reduced)
        if any(gradient is not None and (is_sharded(gradient) or bool(gradient.any())) for gradient in gradients):
            return False
        if self._state_version() != self._begun_version:
            return False
        return not (self._scalers.have_moved if self._scalers.may_skip else may_skip())

    def _contribute_nothing(self) -> bool:
        """Reduce zeros instead of this rank's gradients. If that is not possible, end the step for the peers."""
        self.wait_quorum()
        if len(self._parts) == 1 and not self._machine.has_reduced and self._machine.failure is None:
            self._machine.passes_over = self.group_world_size == 1
            if self._parts[0].pass_over():
                return True
            self._machine.passes_over = False
        self._peers.drop()
        return False

    def _give_up(self) -> None:
        """Abandon a backward pass. The peers must notice at once, since they wait for this rank's reductions."""
        self._machine.gives_up()
        self._peers.drop()
        for part in self._parts:
            part.give_up()

    def _digest_state(self) -> StepDigest | None:
        """Take a digest of the state at the beginning of a step, if it is compared and this rank holds it."""
        machine, every = self._machine, self._runner.check_every
        if not every or machine.step % every or machine.is_torn or self.catches_up:
            return None
        digest = self._state_digests.take(self.state.compared(), machine.step // every)
        return StepDigest(machine.tag, digest, self._state_digests.count)

    def _compare_gradients(self) -> None:
        """Compare the gradients that this rank is about to apply with those of the contributors."""
        number = self._machine.step
        digest = self._gradient_digests.take(self.state.gradients_of(), number, lambda parameter: parameter.grad)
        done = self._thread.submit(lambda: self._runner.compare_gradients(digest))
        reason = self._await("peers", done)
        if reason and self._catch_up is not None:
            self._catch_up.reject(reason)

    def _note_data(self) -> None:
        machine, groups = self._machine, self.num_participants
        if machine.share.counts:
            self._data_uses.committed(machine.step - 1, self.quorum_id)
        if not self._has_looked_at_samplers and groups > 1 and machine.ended > 1:
            self._has_looked_at_samplers = True
            if self._data_uses.choice is None:
                warn_of_split_samplers(self.group_world_size, groups)

    def _tear(self, text: str) -> None:
        log.error("%s; %s", text, APPLY_HINT)
        self._machine.tear(DistrustKind.NOT_APPLIED, f"rank {self.group_rank}: {text}")
        if self._catch_up is not None:
            self._catch_up.torn()


def _is_in_backward() -> bool:
    """Check whether this thread runs a backward pass, in which a recomputed forward pass begins no step."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
