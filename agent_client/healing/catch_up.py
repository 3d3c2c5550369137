"""Carries out the decisions of `CatchUpMachine` (rules/catch_up.py) with tensors and an optimizer.

While this rank is catching up, it keeps a step's gradients instead of applying them. It takes the gradients at the
point at which the optimizer would apply them: after the averaging, and after changes by the script that are the same in
every group, such as clipping. So the backward pass needs no hook, and the gradients are bitwise equal to those of the
peers. For a sharded model (FSDP2), each rank keeps the gradients of its shards. The ranks in a group may apply them in
different steps, so the optimizer must not communicate.

Schedulers belong to the state, but the script steps them in every training step. While the rank is catching up,
`ScheduleReplay` counts and undoes these calls, and repeats them when the kept step is applied.

`request_fields` and `prepare_step` run on the Agent's background thread. All other methods run on the script's thread,
between two steps or at the end of a step.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from agent_client.collectives.observed import never_compiled, not_itself_compiled
from agent_client.errors import AgentError, ConfigurationError
from agent_client.healing.healing import BackgroundFetch, StateOwner, has_room
from agent_client.healing.rules.catch_up import CatchUpAction, CatchUpMachine, PendingStep, Transfer
from agent_client.state.shards import like_parameter, local_part
from agent_client.state.snapshot import StateMismatch
from agent_client.state.train_state import Stateful, TrainState
from lighthouse_protocol.messages.membership import Assignment, CatchUp, Tag

log = logging.getLogger(__name__)


@runtime_checkable
class Replayable(Protocol):
    def replay_step(self) -> None:
        """Apply the change that the script makes to this object after each committed step."""
        ...


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many times the script has stepped each scheduler. The keys are the schedulers' names in the TrainState."""

    between: dict[str, int]  # between the previous and this training step
    inside: dict[str, int]  # during this training step


class ScheduleReplay:
    def __init__(self, others: dict[str, Stateful]) -> None:
        """Create the replay for the objects in `others`, by name.

        Raise ConfigurationError if one of them is neither `Replayable` nor a scheduler that counts its steps.
        """
        self._others = others
        self._optimizer: Optimizer | None = None
        self.saved: dict[str, Any] = {}
        self._settings: list[dict[str, Any]] = []
        self._at_save: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        for name, other in others.items():
            _check(name, other)

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def mark_begin(self) -> None:
        self._begun = self._counts()

    def save(self) -> None:
        for name in self._others.keys() - self.saved.keys():  # registered after the catch-up began
            _check(name, self._others[name])
        self.saved = {name: copy.deepcopy(other.state_dict()) for name, other in self._others.items()}
        self._settings = [_settings(group) for group in self._groups]
        self._at_save = self._counts()

    def undo(self) -> StepCounts:
        """Restore the states from the last `save`. Return how many times the script has stepped each object since."""
        if len(self._groups) != len(self._settings):
            raise ConfigurationError(
                "heal_mode catch_up: not with a parameter group that the script adds while this group catches up; use "
                "heal_mode='blocking'"
            )
        now = self._counts()
        between = {name: self._begun.get(name, count) - self._at_save.get(name, count) for name, count in now.items()}
        inside = {name: count - self._begun.get(name, count) for name, count in now.items()}
        for name, other in self._others.items():
            other.load_state_dict(copy.deepcopy(self.saved[name]))
            if name not in now:
                between[name] = 1  # a Replayable counts no steps, but the script changes it once after each step
        for group, settings in zip(self._groups, self._settings, strict=True):
            group.update(copy.deepcopy(settings))
        return StepCounts(between, inside)

    def move(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            other = self._others[name]
            for _ in range(count):
                other.step() if isinstance(other, LRScheduler) else other.replay_step()  # type: ignore[attr-defined]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def _counts(self) -> dict[str, int]:
        return {name: other.last_epoch for name, other in self._others.items() if isinstance(other, LRScheduler)}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _check(name: str, other: object) -> None:
    counts_itself = isinstance(other, LRScheduler) and isinstance(getattr(other, "last_epoch", None), int)
    if isinstance(other, Replayable) or (counts_itself and not isinstance(other, ReduceLROnPlateau)):
        return
    raise ConfigurationError(
        f"heal_mode catch_up: it is unknown how {name!r}, a {type(other).__name__}, moves from step to step; give it a "
        "method replay_step() that does what the script does to it after a committed step, or use heal_mode='blocking'"
    )


@dataclass(slots=True)
class _Step:
    gradients: list[Tensor | None]  # one per parameter, None if it has no gradient
    buffers: list[Tensor]  # the model's buffers at the end of the step, which a scheduler may read
    moves: StepCounts
    is_first: bool = False
    """True for the first step of the chain. The snapshot already includes the scheduler steps before that step."""


class CatchUpDriver:
    def __init__(self, state: TrainState, owner: StateOwner, fetch: Callable[[Assignment], BackgroundFetch]) -> None:
        """Create the driver. `fetch` starts the transfer of a snapshot from the source that an assignment names."""
        self.machine: CatchUpMachine[_Step] = CatchUpMachine()
        self._state = state
        self._owner = owner
        self._fetch = fetch
        self._schedules = ScheduleReplay(state.others)
        self._optimizer: Optimizer | None = None
        self._transfer: BackgroundFetch | None = None
        self._snapshot: dict[str, Any] | None = None
        self._batches = 0
        self._buffers: list[Tensor] = []
        """The model's buffers as they were after the last kept step that was applied."""

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._schedules.attach(optimizer)

    @property
    def held(self) -> tuple[Tag, int]:
        """Tag of this rank's state, and the number of batches that have contributed to it."""
        if self.machine.held is not None:
            return self.machine.held, self._batches
        return self._owner.tag, self._owner.batches_committed

    def request_fields(self) -> CatchUp:
        self._poll()
        machine = self.machine
        is_wanted = not (machine.heals_blocking or self._owner.is_torn)  # a torn state can only heal in blocking mode
        return CatchUp(is_wanted, machine.held, machine.has_source)

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.cancel("the Agent was closed")

    # -- a step

    def begin_step(self) -> None:
        if self._optimizer is None:
            raise ConfigurationError("heal_mode catch_up: wrap the optimizer in a FaultTolerantOptimizer")
        self._state.register_schedulers()
        if not self.machine.is_catching_up:
            self._schedules.save()
        self._schedules.mark_begin()

    def prepare_step(self, assignment: Assignment) -> None:
        """Start or cancel the transfer of a snapshot, or stop catching up, as the next step's assignment requires."""
        self._poll()
        owner, machine = self._owner, self.machine
        held, was_following = machine.held or owner.tag, machine.is_catching_up
        first = machine.kept_steps[:1] if machine.transfer is Transfer.DONE else ()
        batches = self._batches if was_following else owner.batches_committed
        action = machine.choose_action(assignment, held)
        self._batches = batches
        if action is CatchUpAction.FETCH or machine.transfer is not Transfer.UNDER_WAY:
            self._drop_transfer("the quorum has changed")
        if action is CatchUpAction.FETCH:
            self._transfer = self._fetch(assignment)
        if action is CatchUpAction.RETURN:
            self._return(held, assignment, [kept.content for kept in first])
        if machine.is_catching_up:
            owner.work_at(*machine.peer_tag)

    @not_itself_compiled  # the optimizer may be compiled, so that kept steps run the same code as on the peers
    def apply(self) -> None:
        """Apply a committed step's gradients. While catching up, keep them, and apply the kept steps that are due."""
        assert self._optimizer is not None
        if not self.machine.is_catching_up:
            self._optimizer.step()
            return
        for kept in self._select_steps():
            self._prepare(kept.content)
            self._optimizer.step()
            self._applied(kept)
        self._end_apply()

    def reject(self, reason: str) -> None:
        """Stop catching up and heal in blocking mode, because this rank's gradients differ from its peers'."""
        if self.machine.is_catching_up and not self.machine.heals_blocking:  # log only the first time in a quorum
            log.error("catching up failed, healing by copying the state instead: %s", reason)
            self._drop_transfer(reason)
            self.machine.record_failure(is_hopeless=True)

    def mark_torn(self) -> None:
        """Record that a committed step was not, or only partly, applied. The state is unusable until a heal."""
        if self.machine.is_catching_up:
            self._drop_transfer("the state is torn")
            self.machine.mark_torn()

    # -- internal

    def _poll(self) -> None:
        transfer = self._transfer
        if transfer is None or not transfer.received.done():
            return
        self._transfer = None
        error = transfer.received.exception()
        if error is not None:
            log.warning("catching up failed: %s", error)
            self.machine.record_failure(is_hopeless=isinstance(error, StateMismatch))
            return
        self._snapshot = received = transfer.received.result()
        agent = received["agent"]
        self.machine.record_arrival(Tag(agent["step"], agent["tag_quorum_id"]))

    def _drop_transfer(self, reason: str) -> None:
        if self._transfer is not None:
            self._transfer.cancel(reason)
            self._transfer = None
        if self.machine.transfer is not Transfer.ARRIVED:  # an arrived snapshot will be installed
            self._snapshot = None

    def _return(self, held: Tag, assignment: Assignment, first: Sequence[_Step]) -> None:
        """Stop catching up and continue with the state `held`.

        `first` contains the first kept step not yet applied, if any. The schedulers move to the start of this step.
        """
        owner = self._owner
        owner.work_at(*held)
        owner.batches_committed = self._batches
        if assignment.heals and not assignment.catches_up:  # a blocking heal also replaces the schedulers
            return
        self._schedules.undo()
        for step in first:
            self._move_to(step)
        self._schedules.save()
        self._state.replace_others_begun(self._schedules.saved)

    def _keep(self) -> None:
        owner, machine = self._owner, self.machine
        parameters = self._parameters()
        gradients = [None if parameter.grad is None else local_part(parameter.grad) for parameter in parameters]
        moves = self._schedules.undo()
        tag = owner.tag
        kept: PendingStep[_Step] | None = None
        buffers = list(self._state.model.buffers())
        if machine.can_keep and has_room(sum(kept.nbytes for kept in [*gradients, *buffers] if kept is not None)):
            taken = [None if gradient is None else _copy_to_cpu(gradient) for gradient in gradients]
            buffers = [buffer.detach().to("cpu", copy=True) for buffer in buffers]
            for parameter in parameters:
                parameter.grad = None
            kept = PendingStep(tag, owner.batches, _Step(taken, buffers, moves, is_first=not machine.kept_steps))
        elif machine.can_keep:
            log.warning("catching up: no memory for another step's gradients; healing by copying the state")
        machine.record_commit(kept, tag)
        if not machine.can_keep:
            self._drop_transfer("the gradients to apply after it are not kept")

    def _install(self) -> None:
        owner, received = self._owner, self._snapshot
        assert received is not None
        works_at = owner.tag
        owner.begin_install()
        try:
            self._state.install(received["train"])
        except Exception as e:
            raise AgentError(f"a peer's state was installed only partly: {e}; restart the group") from e
        owner.finish_install(*works_at, owner.batches_committed)
        self._batches, self._snapshot = received["agent"]["batches_committed"], None
        self.machine.record_install()
        log.info(
            "catching up: installed step %d, %d more to apply", self.machine.begins.step, len(self.machine.kept_steps)
        )

    @never_compiled
    def _select_steps(self) -> Sequence[PendingStep[_Step]]:
        """Keep this step. Return the kept steps to apply, or none after installing a snapshot that just arrived."""
        self._poll()
        self._keep()
        if self.machine.transfer is not Transfer.ARRIVED:
            return self.machine.due_steps()
        self._install()
        return ()

    @never_compiled
    def _prepare(self, step: _Step) -> None:
        self._move_to(step)
        self._schedules.move(step.moves.inside)
        for parameter, gradient in zip(self._parameters(), step.gradients, strict=True):
            parameter.grad = None if gradient is None else like_parameter(gradient, parameter)

    @never_compiled
    def _applied(self, kept: PendingStep[_Step]) -> None:
        self._buffers = kept.content.buffers
        self._install_buffers()
        self._batches += kept.batches
        self.machine.record_applied()
        if not self.machine.is_catching_up:
            self._owner.batches_committed = self._batches
            log.info("caught up at step %d", self._owner.step)

    @never_compiled
    def _end_apply(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None
        if self.machine.is_catching_up:
            self._schedules.save()

    def _move_to(self, step: _Step) -> None:
        if not step.is_first:
            self._install_buffers()
            self._schedules.move(step.moves.between)

    def _install_buffers(self) -> None:
        # The forward passes of later steps have changed the buffers in the meantime.
        for buffer, content in zip(self._state.model.buffers(), self._buffers, strict=True):
            buffer.detach().copy_(content)

    def _parameters(self) -> list[Tensor]:
        assert self._optimizer is not None
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _copy_to_cpu(gradient: Tensor) -> Tensor:
    """Return the gradient in CPU memory. A view into a DDP bucket is copied, because the next step overwrites it."""
    is_own = gradient.untyped_storage().nbytes() == gradient.nbytes and not gradient._is_view()
    return gradient if gradient.device.type == "cpu" and is_own else gradient.detach().to("cpu", copy=True)
