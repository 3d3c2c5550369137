"""The Agent, through which a training script takes part in its job. Each rank has one.

The Agent requests quorums, heals, averages gradients and votes. Everything in a step except the vote runs in order on
one background thread: the quorum request, connecting the process group, copying a state, and the collectives. So the
quorum request overlaps with the forward pass, and the first collective waits for the quorum.

`Agent` has the methods for scripts. `Internals` implements them.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack

import torch

from agent_client.collectives.nccl import in_stream_order
from agent_client.collectives.observed import never_compiled
from agent_client.errors import AgentError, ConfigurationError
from agent_client.healing.keeper import Keeper
from agent_client.progress.progress import Block
from agent_client.state.train_state import TrainState
from agent_client.step import evaluation
from agent_client.step.comparison import Part
from agent_client.step.config import DEFAULTS, AgentConfig, AgentOptions, config_of
from agent_client.step.environment import Environment
from agent_client.step.internals import Internals
from agent_client.step.observer import stop_observing
from agent_client.step.rendezvous import ALONE, GroupPlace, rendezvous
from agent_client.step.rules.machine import Phase
from agent_client.step.rules.world_size import WorldSizeMode
from agent_client.step.runner import ReductionFuture
from agent_client.step.script_check import refuse_optimizer, refuse_unhealed
from agent_client.step.stop_signals import uninterrupted
from lighthouse_protocol.limits import MAX_COUNT
from lighthouse_protocol.messages.membership import World

log = logging.getLogger(__name__)


T = TypeVar("T")


class Preemption(NamedTuple):
    """Notice that a host of this replica group will be taken away, or with `is_advice`, that this is likely."""

    source: str
    """aws, gcp, azure, slurm, kubernetes, file or http."""
    reason: str
    seconds_left: float | None
    """Time in seconds until the host is taken away, or None if unknown."""
    is_advice: bool
    """True if the host is only likely to be taken away. The group then continues to train."""
    should_save: bool
    """True if no other replica group stays, so a checkpoint must be saved before the host is taken away."""


class Agent:
    """A rank's connection to its replica group and to the other groups. Create it with `Agent.from_env`.

    A step begins with a quorum: the replica groups that do the step together. The Agent averages gradients over these
    groups, and all of them commit the step or discard it. If this group has fallen behind, the Agent first copies the
    state of a peer. `DistributedDataParallel` and `FaultTolerantOptimizer` call the methods for a step. Only a training
    loop without them calls `start_quorum`, `all_reduce` and `should_commit` itself.

    Use the Agent as a context manager. Exiting the block closes the Agent. If the block raises an exception, the
    Agent also reports it to the manager.

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
        """Start the background thread and the server for this rank's state. Scripts call `from_env` instead.

        Args:
            manager_address: host:port of the group's manager.
            state: The state that a healing peer copies.
            config: The options.
            place: Position of this rank in its replica group.

        Raises:
            ConfigurationError: The state or an option is invalid. Everything that was opened is closed again.
        """
        for optimizer in (state.optimizer, *state.others.values()):
            refuse_optimizer(optimizer)
        refuse_unhealed(state)
        self.state = state
        self.group_rank, self.group_world_size = place.group_rank, place.group_world_size
        self.internals = Internals(self, manager_address, state, config, place)
        """Methods for the modules and optimizers of agent_client.training, not for scripts."""
        self._machine, self._runner, self._thread = self.internals.machine, self.internals.runner, self.internals.thread
        stop_observing()

    @classmethod
    def from_env(cls, *, state: TrainState, **options: Unpack[AgentOptions]) -> Self:
        """Create this rank's Agent from environment variables and options.

        The manager, the replica group and the rank's position in it come from environment variables
        (docs/reference/options.md). With only LIGHTHOUSE_ADDRESS and REPLICA_GROUP_ID set, rank 0 starts the group's
        manager. Unless `lighthouse-manager run` supervises the rank, SIGTERM, SIGHUP and SIGQUIT make the group leave
        the job after its current step. The Agent then raises GroupDrained. Signals for which the script has installed
        a handler are not affected.

        Args:
            state: The state that a healing peer copies.
            **options: Fields of AgentConfig.

        Returns:
            An Agent that is connected to the other ranks in its group and has not requested a quorum yet.

        Raises:
            ConfigurationError: An option or an environment variable is invalid. The message names it. Nothing was
                started.
            AgentError: The group's store or manager does not answer.
        """
        config = config_of(options)
        env = Environment.read()
        config = replace(config, advertise=config.advertise or env.advertise)
        stop_observing()
        address, place = rendezvous(env, config)
        try:
            agent = cls(address, state=state, config=config, place=place)
        except BaseException:
            place.close()
            raise
        finally:
            if place.presence is not None:
                place.presence.close()
        if env.keeper is not None:
            agent.internals.keeper = Keeper(state, env.keeper.every, env.keeper.paths, env.keeper.owner)
        if not env.is_supervised:
            agent.internals.stop_signals.install()
        return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.internals.exit_report.send(e)
        finally:
            self.close()

    def close(self) -> None:
        """Leave the job. Close all connections, and stop the manager if this rank started it.

        First wait, for up to 10 s, until no other rank needs data from this rank to complete the last step. An
        Agent that is still open when the interpreter exits is closed automatically. In a forked child of the process
        that created the Agent, this method does nothing.
        """
        self.internals.close()

    # -- properties, which neither block nor affect a step

    @property
    def current_step(self) -> int:
        """Number of committed steps, which is also the number of the step in progress, counted from 0."""
        return self._machine.step

    @property
    def has_failed(self) -> bool:
        """True if the current step can no longer be committed, because a peer was lost or an error was reported."""
        return self._machine.failure is not None

    @property
    def was_committed(self) -> bool:
        """True if the last step was committed. Reset when the next step begins a forward pass or a reduction."""
        return self._machine.was_committed and not self._machine.has_computed

    @property
    def batches_committed(self) -> int:
        """Number of batches in all committed steps, summed over the replica groups. Skipped batches are included."""
        return self._machine.batches_committed

    @property
    def quorum_id(self) -> int:
        """Id of the last quorum, or 0 before the first quorum."""
        return self.internals.quorum_id

    @property
    def participants(self) -> tuple[str, ...]:
        """Replica ids of the groups in the last quorum, in the order of replica_rank."""
        return self._runner.last.replica_ids if self._runner.last else ()

    @property
    def num_participants(self) -> int:
        """Number of replica groups in the last quorum."""
        return len(self.participants)

    @property
    def world(self) -> World:
        """Size of the job, including replica groups that have not joined yet, as last received from the manager.

        The property returns a stored value and sends no request.
        """
        groups, ranks = max(1, self.num_participants), self.group_world_size
        return self.internals.manager.watch.world or World(groups * ranks, groups, 0, ranks)

    @property
    def preemption(self) -> Preemption | None:
        """Notice that a host of this replica group will be taken away, or None if there is no such notice.

        The script need not act: the group leaves after its current step. If no other group stays, the group first saves
        a checkpoint with the script's `CheckpointFolder`. The property returns a stored value and sends no request.
        """
        newest = self.internals.manager.watch.preemption
        if (notice := newest.notice) is None:
            return None
        left_s = notice.left_s(time.time())
        return Preemption(notice.source, notice.reason, left_s, notice.is_advice, newest.should_save)

    @property
    def peers_pending(self) -> bool:
        """True if a replica group is waiting to join the next quorum. The property returns a stored value."""
        return self.world.peers_pending > 0

    @property
    def last_reconfiguration_s(self) -> float:
        """Seconds that the last reconnection took: from closing the old process group to connecting the new one."""
        return self.internals.peers.last_reconfiguration_s

    @property
    def catches_up(self) -> bool:
        """True if this rank is catching up (`heal_mode="catch_up"`): its state is older than that of its peers."""
        return self.internals.catches_up

    def data_report(self) -> dict[str, int | bool]:
        """Return how much of the data set was used, and whether each sample was used once per epoch.

        Returns:
            An empty dict before the first batch of a StepSampler or StepLoader. Afterwards, a dict with these entries:

            - `length`, `batch_size`, `accumulate` and `seed` of the sampler.
            - `samples`: number of samples drawn for committed steps, also in skipped batches, summed over all groups.
            - `epoch`: number of complete epochs.
            - `position`: number of samples used in the current epoch.
            - `irregular_steps`: number of steps that this rank committed with batches drawn under an earlier quorum, or
              without drawing a batch.
            - `is_exact`: True if there are no irregular steps and the sampler has not changed. Each sample was then
              used `epoch` or `epoch + 1` times.
        """
        return self.internals.data_report()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the training, to be saved in the script's own checkpoint.

        Returns:
            A dict with the integers `step`, `tag_quorum_id` and `batches_committed`. They also determine the sampler's
            position.

        Raises:
            AgentError: The state of this rank is invalid until the rank has healed.
        """
        if self._machine.distrust is not None:
            raise AgentError(f"state_dict: {self._machine.distrust.text}; do not save this state before it heals")
        return self.internals.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint. Load the model and the optimizer first.

        Args:
            state_dict: The value that `state_dict` returned.

        Raises:
            AgentError: A step is in progress, or an entry is not a valid number.
        """
        if self._machine.phase is not Phase.IDLE:
            raise AgentError(f"load_state_dict: a step is under way ({self._machine.phase}); call it between two steps")
        for entry in ("step", "tag_quorum_id", "batches_committed"):
            if not 0 <= (value := state_dict[entry] or 0) < MAX_COUNT:
                raise AgentError(f"agent['{entry}'] of the checkpoint is {value}, not a number from 0 to below 2^53")
        self.internals.move_to(state_dict)

    # -- position of this rank in the script, shown by `lighthouse ranks`

    def phase(self, name: str, total: int | None = None) -> Block:
        """Declare that the code in the `with` block is a phase of the script, such as "validation".

        Phases can be nested. If a phase makes no progress for much longer than usual, the rank is reported as behind
        (docs/how-to/find-a-hang.md).

        Args:
            name: Name shown by `lighthouse ranks`.
            total: Number of `tick` calls that the phase will make, or None if unknown.

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
        return self.internals.progress.phase(name, total)

    def tick(self) -> None:
        """Report progress in the innermost phase, for example after each batch, file or request."""
        self.internals.progress.tick()

    def waiting_for(self, what: str) -> Block:
        """Declare that this rank is waiting for other ranks in the `with` block, so that it is not reported as behind.

        Args:
            what: Name for what the rank is waiting for, shown by `lighthouse ranks`.

        Returns:
            A context manager.
        """
        return self.internals.progress.waiting_for(what)

    # -- the batches of a step

    @property
    def is_participating(self) -> bool:
        """True if this rank's gradients count in the current step. Waits for the step's quorum."""
        self.wait_quorum()
        return self._machine.contributes

    @property
    def quorum_step(self) -> int | None:
        """Number of the current step, or None if it has no quorum. Waits for the step's quorum.

        The number is the same in all groups, so a script can use it to alternate, for example between the generator and
        the discriminator of a GAN. While this rank is healing, `current_step` is lower.
        """
        self.wait_quorum()
        return self._machine.assignment.max_step if self._machine.assignment else None

    @never_compiled
    def slots(self) -> list[tuple[int, int]]:
        """Begin the step if necessary, and return which of its microbatches this rank computes.

        The call waits for the quorum, which is usually known immediately unless a group joins or leaves. In
        CONSTANT_BATCH mode, a rank may have several microbatches. In other modes it has one, even if its gradients do
        not count.

        Returns:
            (index, count) for each microbatch of this rank. `index` numbers the microbatches of all ranks from 0, and
            `count` is their total in the step. Use both to shard the data.
        """
        self.internals.begin_step()
        self.internals.wait_quorum()
        return self._machine.share.slots_of_rank(self.group_rank, self.group_world_size)

    def slot(self) -> tuple[int, int]:
        """Return (index, count) of the only microbatch of this rank, which is the single entry of `slots()`.

        Raises:
            ConfigurationError: The mode is CONSTANT_BATCH, in which a rank may have several microbatches.
        """
        if self._machine.world_size.mode is WorldSizeMode.CONSTANT_BATCH:
            raise ConfigurationError(
                "constant_batch: a step may have several microbatches; see microbatches(), slots()"
            )
        [slot] = self.slots()
        return slot

    # -- one step

    @never_compiled
    def start_quorum(self) -> None:
        """Begin a step by requesting its quorum. Further calls in the same step do nothing.

        After a committed step, the request runs in the background. If this rank may have to heal, the call waits for
        the quorum, and installs the state of a peer if necessary.

        Calling this method is optional, because a forward pass of the wrapped model, `all_reduce` and `should_commit`
        also begin a step. Call it if the script computes something from the state before any of these. Otherwise, if
        this rank must heal in the step, that computation uses the old state and the rank contributes zeros.

        Raises:
            GroupDrained: The group is leaving the job and has completed its last step.
            AgentError: The state of a peer does not match this rank's, or no peer can provide a state.
        """
        self.internals.begin_step()

    @never_compiled
    def wait_quorum(self) -> None:
        """Wait until this step's quorum is known, its process group is connected and this rank has healed if necessary.

        Raises:
            GroupDrained: The group is leaving the job and has completed its last step.
            AgentError: This rank cannot join a quorum or heal, and a retry would not help.
        """
        self.internals.wait_quorum()

    @never_compiled
    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        within_group: bool = True,
        name: str = "",
        followed_by: Sequence[Part] = (),
    ) -> "Future[torch.Tensor]":
        """Average a tensor over the groups whose gradients count, in place, on the background thread.

        Autograd does not record the change, so a loss that is averaged for a log keeps its gradient. If a peer is lost,
        the future still completes, but the step is discarded and the content of `tensor` is undefined.

        Args:
            tensor: Tensor of any shape with a floating-point dtype, on a device that the process group supports. All
                groups must make the same calls in the same order, with the same number of elements and dtype.
            within_group: Whether to average also over the ranks in the replica group. Pass False if the ranks hold
                different shards.
            name: Name of the tensor in error messages. All groups must use the same name.
            followed_by: Name, number of elements and dtype of each reduction that is certain to follow directly, in
                order. The groups then compare all of them in a single exchange.

        Returns:
            A future that completes with `tensor`.
        """
        internals, runner = self.internals, self._runner
        internals.begin_step(has_computed=True)
        self._machine.record_compute()
        self._machine.reductions += 1
        entry = internals.progress.numbers.over()
        following = followed_by if len(internals.parts) < 2 else ()  # the buckets of two modules may interleave
        return self._thread.submit(
            in_stream_order(tensor, lambda: runner.reduce(tensor, within_group, entry, name, following)),
            ReductionFuture(internals.progress),
        )

    @never_compiled
    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in this replica group, in place. All ranks in the group must call this.

        Args:
            tensor: Tensor of any shape. Shape, dtype and device type must be the same on all ranks in the group.

        Returns:
            `tensor`.

        Raises:
            RuntimeError: A rank in the group was lost.
        """
        return self.internals.sum_over_group(tensor)

    @never_compiled
    def skip_batch(self, reason: str) -> None:
        """Skip this rank's batch. Call this instead of the backward pass, and step the optimizer as usual.

        The step then uses the mean of the other groups' gradients. In a group with several ranks, the group still
        counts, and the skipped batch enters the group's mean as zeros. If some gradients were reduced already, or if
        several modules use the Agent, the step is discarded instead. A StepSampler does not return the batch again in
        this epoch, unless the step is discarded.

        In a step with several batches, call this under `no_sync()` to skip any batch but the last. Such a batch then
        adds nothing to the gradients. Skipping the last batch also drops this rank's gradients of the other batches.

        Args:
            reason: Reason to log. The log also contains the sample indices if the batch comes from a StepSampler.
        """
        self.internals.begin_step()
        self.internals.wait_quorum()
        log.warning("step %d: %s; batch skipped%s", self.current_step, reason, self._runner.samples_text())
        if not (self.internals.skip_microbatch() or self.internals.contribute_nothing()):
            self.internals.fail_step(f"a batch was skipped: {reason}")

    @never_compiled
    def report_error(self, error: BaseException | str) -> None:
        """Make all groups discard the current step.

        Args:
            error: Reason to log.
        """
        self.internals.fail_step(str(error))

    @never_compiled
    def should_commit(self) -> bool:
        """Vote on the step, and wait for the decision.

        Returns:
            True if the step is committed. The script must then apply the gradients. False if the step is discarded. The
            script must then leave the parameters and the optimizer unchanged.

        Raises:
            ScriptMismatch: The other groups run different collectives in this step.
            AgentError: `max_consecutive_discards` was reached, or this rank voted yes and cannot learn the decision.
        """
        return self.internals.vote()

    @contextlib.contextmanager
    def applying(self) -> Generator[None]:
        """Mark the code that applies a committed step, in a script that does not use an optimizer of this package.

        If the `with` block raises, the state may be half updated, so this rank heals before its gradients count again.
        FaultTolerantOptimizer, LocalSGD and DiLoCo call this method themselves.

        Returns:
            A context manager.

        Example:
            ```python
            if agent.should_commit():
                with agent.applying():
                    sgd.step()
            ```
        """
        self.internals.applying.entered()
        try:
            yield
        except BaseException as e:
            self.internals.tear_unapplied(e)
            raise
        self.internals.applying.left()

    def on_commit(self, callback: Callable[[int], object]) -> None:
        """Register a function that is called after each committed step, and never after a discarded step.

        The function runs on the script's thread after FaultTolerantOptimizer has applied the step. If the script
        applies steps itself, the function runs when the next step begins. On a rank that is catching up (`catches_up`),
        the step is not applied yet. An exception in the function propagates out of `optimizer.step()`.

        Args:
            callback: Called with `current_step`, the number of committed steps. It is 1 after the first step.
        """
        self.internals.commit_callbacks.append(callback)

    # -- called by all ranks together between two steps

    def evaluate_on_rank0(
        self,
        evaluate: Callable[[], T],
        *,
        what: str = "validation",
        whole_group: bool | None = None,
        within_s: float = 86400.0,
    ) -> T:
        """Evaluate on rank 0, and return the result on all ranks.

        All ranks must call this between two steps, at the same `current_step`. Rank 0 is group rank 0 of the first
        replica group that holds the newest state. The other ranks wait, and are not considered hung as long as rank 0
        makes progress.

        Args:
            evaluate: Function without arguments. It must use the unwrapped model. It may return numbers, strings,
                tensors of any shape and dtype, and dicts, lists and tuples of these.
            what: Name of the evaluation in logs and in `lighthouse ranks`.
            whole_group: Whether all ranks in that replica group call `evaluate`. By default, they do if the state is
                sharded.
            within_s: Time limit in seconds.

        Returns:
            The result of `evaluate` on rank 0, with tensors on the CPU.

        Raises:
            Exception: On an evaluating rank, the exception that `evaluate` raised.
            EvaluationFailed: On the other ranks, with the type and message of that exception.
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
        result = evaluation.evaluate_on_rank0(self.internals, evaluate, what, whole_group, within_s)
        self.internals.progress.compute.restart(self.internals.progress.clock())  # only rank 0 has computed
        return result

    def check_equal(self, what: str, value: object, *, within_s: float = 600.0) -> None:
        """Check that a value is the same on all ranks.

        All ranks must call this before their first step or between two steps. Before the first step of a group that
        joins or resumes after step 0, the value is compared only among the ranks in that group.

        Args:
            what: Name of the value in the error message.
            value: A number or a string. Its `repr` is compared. Name and `repr` together may have 1000 characters.
            within_s: Time limit in seconds.

        Raises:
            RankMismatch: The values differ. All ranks raise this. The message lists the values and their ranks.
            EvaluationInterrupted: A rank was lost.
            ConfigurationError: The value is too long.
            AgentError: A step is in progress.
        """
        evaluation.check_equal(self.internals, what, value, within_s)
