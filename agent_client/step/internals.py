"""The Agent's internals: its components, and the part of a step that runs on the script's thread.

agent_client.training and the integrations use them as `agent.internals`. Training scripts do not use them. A wrapped
module registers itself (`add_part`) and reports its forward and backward passes. Their order shows which steps the
script has abandoned (rules/loop_order.py).
"""

import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore
from torch.optim import Optimizer

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.nccl import in_stream_order
from agent_client.collectives.observed import ObservedGroup, never_compiled
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ConfigurationError, GroupDrained, first_line
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.healing import Healing
from agent_client.healing.keeper import Keeper
from agent_client.manager_client.client import ExitReport, ManagerConnection
from agent_client.progress.progress import make_progress
from agent_client.state.digest import Digests
from agent_client.state.random_state import restore_random
from agent_client.state.shards import is_sharded
from agent_client.state.train_state import Scalers, TrainState
from agent_client.step.comparison import StepDigest
from agent_client.step.config import AgentConfig
from agent_client.step.environment import own_host
from agent_client.step.rendezvous import GroupPlace
from agent_client.step.rules.comparison import DataChoice, DataUses
from agent_client.step.rules.loop_order import StepPart
from agent_client.step.rules.machine import Applying, Phase, StepMachine
from agent_client.step.rules.world_size import WorldSizeMode, slot_among_all
from agent_client.step.runner import BackgroundThread, StepRunner
from agent_client.step.script_check import (
    UNAVERAGED,
    OptimizerWatch,
    ScheduleWatch,
    is_in_backward,
    may_skip,
    refuse_bypassed,
    refuse_live_objects,
    warn_of_split_samplers,
)
from agent_client.step.stop_signals import (
    Closable,
    StopSignals,
    close_at_end,
    close_each,
    forget_closed,
    uninterrupted,
)
from lighthouse_protocol.messages.membership import DistrustKind, Tag
from lighthouse_protocol.messages.progress import DataUse
from lighthouse_protocol.rules.preemption import MIN_SAVE_S, save_left_s
from lighthouse_runtime.client.clients import manager_at

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

ONLY_ACCUMULATED = (
    f"{UNAVERAGED}its last backward pass ran under no_sync(): "
    "run the last pass of each step outside of it, including a step with fewer batches at the end of an epoch"
)


class Internals:
    """Components of an Agent, and its methods for modules, optimizers and samplers."""

    def __init__(
        self, agent: Closable, manager_address: str, state: TrainState, config: AgentConfig, place: GroupPlace
    ) -> None:
        """Create the components. Collectives and transfers are aborted when the manager revokes their quorum.

        If this raises ConfigurationError, nothing was opened.
        """
        if config.share_by_speed and place.group_world_size > 1:
            raise ConfigurationError(
                f"share_by_speed: this group has {place.group_world_size} ranks; only groups of one rank can share"
            )
        self._pid = os.getpid()
        self._agent = agent
        """Keeps the Agent alive as long as its threads, so that it is closed when the interpreter exits."""
        self.state = state
        self.place = place
        self.ranks = place.group_world_size
        self.machine = machine = StepMachine(world_size=config.counting, is_alone=place.group_world_size == 1)
        self.catch_up: CatchUpDriver | None = None
        """None unless `heal_mode` is "catch_up"."""
        if config.heal_mode == "catch_up":
            self.catch_up = CatchUpDriver(
                state, machine, lambda assignment: self.healing.fetch_in_background(assignment)
            )
        self._host = own_host(str(manager_at(manager_address)), config.advertise)
        self._timeout_s = config.timeout_s
        self.peers = Peers(
            place.group_rank,
            self._host,
            connect_timeout_s=config.connect_timeout_s,
            timeout_s=config.timeout_s,
            process_group=config.process_group,
        )
        self.progress = make_progress(place.group_rank)
        self.progress.activity.data = self.data_use
        self.healing = Healing(state, place.group_rank, self._host, config.heal_timeout_s, self.progress.activity)
        self.manager = ManagerConnection(
            manager_address,
            place.group_rank,
            secrets.token_hex(6) if place.presence is None else place.presence.rank_incarnation,
            self._revoke,
            on_group_lost=self._abort_group,
            returns_within_s=0.0 if place.manager_process else config.manager_restart_timeout_s,
            progress=self.progress,
        )
        self.exit_report = ExitReport(self.manager.report)
        self.exit_report.install()
        self.stop_signals = StopSignals(self.manager, place.group_rank)
        self.scalers = Scalers(state)
        self.runner = StepRunner(
            machine, self.manager, self.peers, self.healing, place, config, self.progress, self.scalers, self.catch_up
        )
        self.thread = BackgroundThread(f"lighthouse agent {place.group_rank}")
        self.keeper: Keeper | None = None
        """None unless this rank's supervisor keeps copies of its state."""
        self.applying = Applying()
        self.optimizer_watch = OptimizerWatch(state, self.applying)
        self._schedule_watch = ScheduleWatch(state)
        self.data_uses = DataUses()
        self.commit_callbacks: list[Callable[[int], object]] = []
        self.attached: weakref.WeakSet[Closable] = weakref.WeakSet()
        """Objects that are closed with the Agent."""
        self.last_saves: list[Callable[[float], object]] = []
        """Functions that save a checkpoint within the given seconds. Called after a drain if no other group stays."""
        self.last_vote: tuple[weakref.ref[Optimizer], int] | None = None
        """The FaultTolerantOptimizer that voted last, and the value of `StepMachine.moves` at that time."""
        self.applies_gradients = False
        """True if a FaultTolerantOptimizer applies the gradients, and not the script itself."""
        self.parts: list[StepPart] = []
        self._reductions_of_parts = 0
        self._quorum: Future[None] | None = None
        """Completes when the quorum is known, its process group is connected, and the state to heal to has arrived."""
        self._uncalled_commit: int | None = None
        """Committed step whose `on_commit` callbacks have not been called yet."""
        self._has_begun_late = False
        self._begun_version = 0
        self._drawn: tuple[int, set[tuple[int, int]]] = (-1, set())
        self._is_checked = self._is_sendable = self._has_looked_at_samplers = False
        self._state_digests, self._gradient_digests = Digests(), Digests()
        self._reduce_again: Callable[[], None] = lambda: None
        self._count_kept: Callable[[], int] = lambda: 0
        self._torch_groups = itertools.count()
        close_at_end(agent)
        if place.presence is not None:
            self.manager.ensure_watched()

    def _revoke(self, quorum_id: int | None, reason: str) -> None:
        """Abort the collectives and state transfers of a revoked quorum, or of every quorum if `quorum_id` is None.

        Called on the thread that watches the manager.
        """
        self.peers.revoke(quorum_id, reason)
        self.healing.revoke(quorum_id, reason)

    def _abort_group(self, reason: str) -> None:
        """Abort all waits for other ranks, because a rank in this group was lost.

        Called on the thread that watches the manager.
        """
        self._revoke(None, reason)
        if self.place.group is not None:
            self.place.group.abort()

    @uninterrupted
    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads, and shares the connections and the manager
        forget_closed(self._agent)
        self.optimizer_watch.close()
        if self.keeper is not None:
            self.keeper.close()
        self.exit_report.uninstall()
        self.stop_signals.uninstall()
        self.manager.close(self.machine.next_step)
        self.peers.drop()
        if self.catch_up is not None:
            self.catch_up.close()
        self.thread.close(5.0)
        self.peers.close()
        self.healing.close()
        self.place.close()
        close_each(self.attached)
        self.attached.clear()

    # -- settings that modules and optimizers change once

    def add_part(self, part: StepPart) -> None:
        """Add a wrapped module. It replaces an earlier wrapper of the same module."""
        module = uncompiled(part.module)
        self.parts = [*(each for each in self.parts if uncompiled(each.module) is not module), part]

    def request_late(self) -> None:
        """Request each quorum only when its step begins. This suits long steps, as with LocalSGD."""
        self.manager.asks_ahead = False
        self.runner.requests_late = True

    def catch_up_for(self, optimizer: Optimizer) -> CatchUpDriver | None:
        """Make the catch-up driver step `optimizer` after each commit, and return the driver.

        Return None if `heal_mode` is not "catch_up".
        """
        if self.catch_up is not None:
            self.catch_up.attach(optimizer)
        return self.catch_up

    def refuse_catch_up(self, what: str) -> None:
        """Raise ConfigurationError if `heal_mode` is "catch_up". `what` is the feature that does not support it."""
        if self.catch_up is not None:
            raise ConfigurationError(f"heal_mode catch_up: not with {what}; use heal_mode='blocking'")

    def salvage_by(self, reduce_again: Callable[[], None], count_kept: Callable[[], int]) -> None:
        """Register `reduce_again`, which reduces the gradients of the current step once more.

        If a peer is lost in a step, the Agent requests another quorum and calls `reduce_again`, so the script need not
        compute the gradients again. It does so only if `reduce_again` can repeat all reductions of the step.
        `count_kept` returns how many it can repeat.
        """
        world_size = self.machine.world_size
        if world_size.mode is not WorldSizeMode.DYNAMIC:
            raise ConfigurationError(
                f"salvage: in {world_size.mode} mode the next quorum may assign other microbatches to this group than "
                "those that it has computed, so that one would count twice and another not at all; leave salvage out, "
                "or use world_size_mode='dynamic'"
            )
        self._reduce_again, self._count_kept = reduce_again, count_kept

    @property
    def can_salvage(self) -> bool:
        """True if all reductions of this step can be repeated, and no GradScaler would have to unscale them again."""
        has_all = 0 < self._count_kept() == self.machine.reductions
        return has_all and self.machine.is_salvageable and not self.scalers.may_skip

    def group_for_torch(self) -> ObservedGroup:
        """Return a process group of this replica group's ranks, for a torch module that communicates among them."""
        group = self.place.group or GlooGroup(
            HashStore(), 0, 1, self._host, connect_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        return ObservedGroup(group.for_torch(f"torch/{next(self._torch_groups)}"), self.progress)

    # -- state of this rank

    @property
    def catches_up(self) -> bool:
        """True if this rank is catching up: its state is older than that of its peers."""
        return self.catch_up is not None and self.catch_up.machine.is_catching_up

    @property
    def has_state(self) -> bool:
        """True if this rank holds the complete state of the current step."""
        return not (self.catches_up or self.machine.is_torn)

    @property
    def quorum_id(self) -> int:
        return self.runner.last.quorum_id if self.runner.last else 0

    @never_compiled
    def last_slot(self) -> tuple[int, int]:
        """Return (index, count) of this rank among all ranks in the last quorum. Wait for the first quorum."""
        self.wait_first_quorum()
        return slot_among_all(self.runner.last, self.place.group_rank, self.place.group_world_size)

    # -- samplers

    def draw_counts(self) -> tuple[int, int, bool]:
        return self.machine.ended, self.machine.moves, self.machine.accumulates

    def record_source(self, data: DataChoice, *, is_whole_step: bool = True) -> None:
        """Record `data`, the sampler settings for the current step's batches. The step's quorum must be known.

        `is_whole_step` is False if this rank also draws other batches for the step.
        """
        self.runner.comparison.data = data
        if is_whole_step:
            self.data_uses.drawn(data, self.machine.step, self.quorum_id)

    @never_compiled
    def record_draw(self, sampler: object, number: int, batch: Callable[[], torch.Tensor]) -> bool:
        """Record that this rank has drawn batch `number` from `sampler`. `batch` returns its sample indices.

        If the draw shows that the script has abandoned the current step, discard that step and return False.
        """
        machine = self.machine
        if self._drawn[0] != machine.ended:
            self._drawn = machine.ended, set()
        drawn = id(sampler), number  # several samplers may draw their batches of the same number
        is_again, has_begun = drawn in self._drawn[1], machine.phase is not Phase.IDLE and machine.has_computed
        self._drawn[1].add(drawn)
        left_out = is_again and has_begun and not machine.is_in_backward and self._discard_redrawn()
        self.runner.samples = batch
        return not left_out

    def data_report(self) -> dict[str, int | bool]:
        return self.data_uses.summary(self.machine.batches_committed * self.place.group_world_size)

    def data_use(self) -> DataUse | None:
        report = self.data_report()
        if not report:
            return None
        return DataUse(report["length"], report["samples"], report["irregular_steps"], bool(report["is_exact"]))

    # -- one step

    def begin_step(self, *, has_computed: bool | None = None) -> None:
        """Begin a step if none is in progress.

        If `has_computed` is None and a backward pass was abandoned, first vote on its step, which discards that step.

        Args:
            has_computed: Whether the script has already computed something for this step, so no peer's state may be
                installed. By default (None), this is True inside a backward pass, and False elsewhere.
        """
        machine = self.machine
        if has_computed is None:
            has_computed = is_in_backward()
            if machine.is_in_backward and not has_computed:
                self.vote()
        if machine.phase is not Phase.IDLE:
            return
        has_moved = machine.ended == 0 and self.restore_kept()
        if wrong := self.applying.begins(may_skip):
            self.tear(wrong)
        self.call_on_commit()
        may_heal = self.runner.requests_late or machine.may_heal or machine.tag_quorum_id is None or self.catches_up
        self._has_begun_late, heals_first = has_computed, may_heal and not has_computed
        if not machine.was_committed and self.catch_up is None:  # a group that catches up moves its schedulers itself
            self._schedule_watch.check_discarded()
        if not machine.was_committed and not has_computed:  # otherwise the loss may already be scaled
            self.scalers.restore()
        self._begin_with_state()
        self._request_quorum(heals_first=heals_first)
        if heals_first:
            self._heal_first()
        elif (self.state.moves_in_forward or self.manager.watch.preemption.notice) and not has_computed:
            self.wait_quorum()  # so that a copy of the state, or the last checkpoint, is complete before any change
        if has_moved and has_computed:
            self.fail_step("its gradients were computed before this rank had restored its state")
        if self.keeper is not None and self.has_state and not machine.must_install:
            self.keeper.keep(self.position())

    def restore_kept(self, above: Tag | None = None) -> bool:
        """Restore the state that this rank's supervisor has kept. Return False if there is none of a later step.

        The step must be later than that of the current state and, if given, of the tag `above`. All ranks in the group
        call this together, before their first step.
        """
        keeper, place = self.keeper, self.place
        if keeper is None:
            return False
        above = max(self.machine.tag, above or Tag(0, 0), key=lambda tag: tag.step)
        kept: Any = keeper.restore(place.group_rank, self.ranks, above, self.sum_over_group)
        if kept is None:
            return False
        self.state.install(kept["train"])  # `restore` has checked it
        self.move_to(kept["agent"])
        restore_random(kept["random"])
        log.info("restored step %d, which this host has kept in memory", self.machine.step)
        return True

    def position(self) -> dict[str, Any]:
        """Return this rank's position in the training: step, tag and number of batches."""
        tag, batches = self.machine.tag, self.machine.batches_committed
        if self.catch_up is not None:
            tag, batches = self.catch_up.held
        return {"step": tag.step, "tag_quorum_id": tag.quorum_id, "batches_committed": batches}

    def move_to(self, position: Mapping[str, Any]) -> None:
        """Continue training at a position that position() returned earlier. Load the state before this call."""
        self.machine.finish_install(position["step"], position["tag_quorum_id"], position["batches_committed"])
        self.scalers.forget_begun()

    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            entry = self.progress.numbers.inside()
            self.thread.submit(lambda: self.runner.sum_over_group(tensor, entry)).result()
        return tensor

    def _begin_with_state(self) -> None:
        machine = self.machine
        if self.catch_up is not None:
            self.catch_up.begin_step()
        self.state.begin_step()
        self._schedule_watch.begin_step()
        if machine.was_committed and not self._is_sendable:
            self.state.check_sendable()
            self._is_sendable = True
        self.scalers.begin_step()
        self.runner.comparison.digest = self._digest_state()
        self.progress.step(machine.step)
        machine.begin()
        self._begun_version = self._state_version()

    def _digest_state(self) -> StepDigest | None:
        """Return a digest of the state with which the step begins, or None if this rank's state is not compared."""
        machine, every = self.machine, self.runner.comparison.check_every
        if not every or machine.step % every or not self.has_state:
            return None
        digest = self._state_digests.take(self.state.compared(), machine.step // every)
        return StepDigest(machine.tag, digest, self._state_digests.count)

    def _state_version(self) -> int:
        """Return the version counter of the first parameter, which changes when the script modifies the parameters."""
        first = next(iter(self.state.model.parameters()), None)
        return 0 if first is None else first._version

    def _request_quorum(self, *, heals_first: bool = False) -> None:
        self.machine.ask(heals_first=heals_first)
        self._quorum = self.thread.submit(lambda n=self.progress.numbers.over_groups: self.runner.prepare_step(n))

    def _heal_first(self) -> None:
        try:
            self.wait_quorum()
            if self.runner.install_state():
                self._begin_with_state()
        except GroupDrained:
            raise
        except AgentError as e:
            self.exit_report.send(e)  # send this before the peers see closed connections
            self.peers.drop()
            raise

    def wait_quorum(self) -> None:
        if self._quorum is not None:
            try:
                self._wait_for("quorum", self._quorum)
            except GroupDrained:
                self._save_last()
                raise

    def _save_last(self) -> None:
        """Save a checkpoint after the group's last step, if the manager has requested it."""
        preemption = self.manager.watch.preemption
        if preemption.notice is None or not preemption.should_save:
            return
        saves, self.last_saves = self.last_saves, []
        left_s = save_left_s(preemption.notice, time.time())
        for save in saves if left_s >= MIN_SAVE_S else ():
            try:
                save(left_s)
            except Exception:  # the script expects GroupDrained
                log.exception("the last checkpoint before this host ends was not saved")

    def wait_first_quorum(self) -> None:
        """If there has been no quorum yet, begin a step and wait for its quorum."""
        if self.runner.last is None:
            self.begin_step()
            self.wait_quorum()

    def _wait_for(self, what: str, done: "Future[T]") -> T:
        if done.done():
            return done.result()
        with self.progress.waiting_for(what):
            return done.result()

    def _reach_all(self) -> None:
        self._wait_for("peers", self.thread.submit(self.runner.reach_all))

    @never_compiled
    def begin_forward(self, part: StepPart, *, accumulates: bool = False) -> None:
        """Record that a forward pass of `part` is beginning, and begin the step if none is in progress.

        `accumulates` is True if the backward pass of this forward pass will not reduce gradients. If the forward pass
        shows that the script has abandoned the current step, first discard that step.
        """
        self._discard_if_left_out(part, accumulates=accumulates)
        self.begin_step()
        self._sync_order(part)
        if not accumulates:
            part.pass_order.record_forward()
        self.machine.record_compute(accumulates=accumulates)

    @never_compiled
    def begin_backward(self) -> None:
        """Record that a backward pass is about to reduce some gradients of a wrapped module.

        Unless the pass is abandoned, `end_backward` follows.
        """
        self.machine.is_in_backward = True
        self._reductions_of_parts += 1

    @never_compiled
    def end_backward(self) -> None:
        """Record that a backward pass has reduced all of its gradients."""
        self.machine.is_in_backward = False
        self.progress.leave_reduction()

    @never_compiled
    def receive_from_first(self, packed: torch.Tensor) -> "Future[torch.Tensor]":
        entry = self.progress.numbers.over()
        return self.thread.submit(in_stream_order(packed, lambda: self.runner.receive_from_first(packed, entry)))

    def fail_step(self, reason: str) -> None:
        self.thread.submit(lambda: self.machine.record_error(reason)).result()

    def vote(self) -> bool:
        machine = self.machine
        if machine.phase is Phase.VOTED:
            raise AgentError(
                "the outcome of this rank's last vote is unknown, so it cannot vote on another step; "
                "end this process so that its group restarts: see the first error for the cause"
            )
        if machine.is_in_backward:  # notify the peers immediately, because they wait for this rank's reductions
            machine.abandon_backward()
            self.peers.drop()
            for part in self.parts:
                part.abandon_backward()
        self.begin_step(has_computed=True)
        self._check_script()
        while not (is_committed := self._end_attempt()) and self.can_salvage:
            self._request_quorum()
            self.wait_quorum()
            self._reduce_again()
        try:
            self._end_step(is_committed=is_committed)
        except BaseException as e:
            if is_committed:
                self.tear_unapplied(e)
            raise
        if self._has_begun_late and machine.must_heal_next:
            self.begin_step()  # a loop that begins its steps with a reduction would also begin the next one too late
        return is_committed

    def _end_step(self, *, is_committed: bool) -> None:
        machine, last, progress = self.machine, self.runner.last, self.progress
        for part in self.parts:
            part.end_step(is_committed=is_committed)
        has_healed = last is not None and (last.heals or last.catches_up)
        counts = {"is_committed": is_committed, "has_healed": has_healed}
        microbatches = 0 if machine.skips_batch else len(machine.share.microbatches)
        progress.compute.end_step(progress.clock(), microbatches, **counts)
        self._uncalled_commit = machine.step if is_committed else None
        if is_committed:
            self._note_data()

    def _check_script(self) -> None:
        machine = self.machine
        if machine.has_computed and machine.accumulates and not machine.reductions and machine.failure is None:
            gradients = (parameter.grad for part in self.parts for parameter in part.parameters_reduced)
            if any(gradient is not None for gradient in gradients):
                raise ConfigurationError(ONLY_ACCUMULATED)
        if not self._is_checked:
            refuse_live_objects(self.state, has_reduced=self.progress.numbers.over_groups > 0)
            if self.applies_gradients and machine.failure is None:
                modules = [part.module for part in self.parts]
                refuse_bypassed(self.state, modules, machine.reductions, self._reductions_of_parts)
            self._is_checked = True
        if not self.runner.requests_late and (moved := self.state.find_moved()):
            self.refuse_catch_up(f"{moved}, which changes in the forward pass")
            log.info("%s changes in the forward pass, so each forward pass now waits for its quorum", moved)
            assignment = machine.assignment
            if assignment is not None and assignment.has_healing and not assignment.heals:
                self.fail_step(f"{moved} changed in the forward pass while a peer read it")
        if self.catch_up is not None and (moved := self.state.find_moved_extra_state()):
            self.refuse_catch_up(f"{moved}, which changes in the forward pass")

    def _end_attempt(self) -> bool:
        machine, comparison = self.machine, self.runner.comparison
        self.wait_quorum()
        for part in self.parts:
            part.share_buffers()
        if comparison.compares_end or not (machine.has_reduced and self.thread.is_idle):
            self._reach_all()
        if comparison.should_compare_gradients:
            digest = self._gradient_digests.take(self.state.optimized(), machine.step, lambda each: each.grad)
            reason = self._wait_for("peers", self.thread.submit(lambda: comparison.compare_gradients(digest)))
            if reason and self.catch_up is not None:
                self.catch_up.reject(reason)
        if self.keeper is not None:
            self.keeper.finish()
            if machine.distrust is not None and machine.distrust.kind is DistrustKind.DIVERGENCE:
                self.keeper.clear()  # it is unknown since when this rank's state has been wrong
        is_committed = self.runner.finish_step()
        if is_committed:
            self.applying.note_commit(machine.step - 1)
        return is_committed

    def _note_data(self) -> None:
        machine, assignment = self.machine, self.runner.last
        if machine.share.counts:
            self.data_uses.count_commit(machine.step - 1, self.quorum_id)
        groups = assignment.replica_world_size if assignment is not None else 0
        if not self._has_looked_at_samplers and groups > 1 and machine.ended > 1:
            self._has_looked_at_samplers = True
            if self.data_uses.choice is None:
                warn_of_split_samplers(self.place.group_world_size, groups)

    def tear(self, text: str) -> None:
        """Record that a committed step has not been fully applied, so this rank must heal. Log `text` as the reason."""
        log.error("%s; %s", text, APPLY_HINT)
        self.machine.tear(DistrustKind.NOT_APPLIED, f"rank {self.place.group_rank}: {text}")
        if self.catch_up is not None:
            self.catch_up.mark_torn()

    def tear_unapplied(self, error: BaseException) -> None:
        """Record that `error` was raised before the step that was just committed had been applied."""
        what = f"{type(error).__name__}: {first_line(error)}"
        self.tear(f"step {self.machine.step - 1} was committed and not applied: {what}")

    @never_compiled
    def call_on_commit(self) -> None:
        """Call the `on_commit` callbacks for the last committed step, unless they have already been called."""
        step, self._uncalled_commit = self._uncalled_commit, None
        if step is not None:
            for callback in self.commit_callbacks:
                callback(step)

    # -- steps that the script abandons

    def _discard_if_left_out(self, part: StepPart, *, accumulates: bool) -> None:
        machine, order = self.machine, part.pass_order
        self._sync_order(part)
        if machine.phase is Phase.IDLE or machine.is_in_backward or is_in_backward():
            return
        if order.has_reduced:
            if self._is_starting_over() and order.record_forward_after_reset():
                self._discard_left_out(UNVOTED)
        elif not accumulates and part.has_abandoned and order.has_abandoned_step():
            self._discard_left_out(LEFT_OUT)

    def _sync_order(self, part: StepPart) -> None:
        machine = self.machine
        part.pass_order.sync(step=machine.step, ended=machine.ended, was_committed=machine.was_committed)

    def _discard_redrawn(self) -> bool:
        """Discard the step, and return True, if drawing a batch again shows that the script has abandoned the step."""
        for part in self.parts:
            self._sync_order(part)
        if not any(part.pass_order.has_reduced for part in self.parts):
            is_left_out, reason = bool(self.parts), LEFT_OUT
        else:
            is_left_out, reason = self._is_starting_over(), UNVOTED
        if is_left_out:
            self._discard_left_out(reason)
        return is_left_out

    def _discard_left_out(self, reason: str) -> None:
        if reason is UNVOTED or self.contribute_nothing():
            # Take part in all remaining collectives of this step, so that the peers can commit it.
            for part in self.parts:
                part.share_buffers()
            if self.runner.comparison.compares_end:
                self._reach_all()
                self.runner.comparison.compares_end = False
        self.fail_step(f"{reason}{self.runner.samples_text()}. {SKIP_HINT}")
        self.vote()
        for part in self.parts:
            part.pass_order.record_discard()

    def _is_starting_over(self) -> bool:
        """Return whether the script has started the step over: it has reset gradients that were already reduced.

        A loop that accumulates still has the gradients. If the parameters have changed, as with SAM, or a GradScaler
        has skipped the step, the script may have reset the gradients on purpose, so the result is False.
        """
        reduced = [part for part in self.parts if part.pass_order.has_reduced]
        gradients = (parameter.grad for part in reduced for parameter in part.parameters_reduced)
        if any(gradient is not None and (is_sharded(gradient) or bool(gradient.any())) for gradient in gradients):
            return False
        if self._state_version() != self._begun_version:
            return False
        return not (self.scalers.has_state_changed if self.scalers.may_skip else may_skip())

    def skip_microbatch(self) -> bool:
        """Skip a batch whose backward pass would reduce nothing (`no_sync()`). Return False for any other batch."""
        return bool(self.parts) and all(part.skip_microbatch() for part in self.parts)

    def contribute_nothing(self) -> bool:
        """Reduce zeros instead of this rank's gradients. If that fails, disconnect from the peers and return False."""
        self.wait_quorum()
        machine = self.machine
        if len(self.parts) == 1 and not machine.has_reduced and machine.failure is None:
            machine.skips_batch = self.place.group_world_size == 1
            if self.parts[0].contribute_zeros():
                return True
            machine.skips_batch = False
        self.peers.drop()
        return False


def uncompiled(module: Any) -> Any:
    """Return the module that torch.compile has wrapped, or `module` itself."""
    return getattr(module, "_orig_mod", module)
