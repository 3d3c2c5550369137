"""Agent: what a training script holds. One object per rank; it asks for quorums, heals, reduces and votes.

Everything of a step but the vote runs on one background thread, in order: the quorum, the process group, the transfer
of state, the collectives. So the quorum overlaps the forward pass, and the first collective waits for it.
"""

import contextlib
import gc
import itertools
import logging
import secrets
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import HashStore
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from agent_client.agent.at_exit import close_at_end, was_closed
from agent_client.agent.background_thread import BackgroundThread
from agent_client.agent.environment import Environment
from agent_client.agent.evaluation import AgentTogether
from agent_client.agent.rendezvous import meet
from agent_client.agent.rules.applying import Applying
from agent_client.agent.rules.loop_order import StepPart
from agent_client.agent.rules.step import Phase, StepMachine
from agent_client.agent.rules.world_size import WorldSize, WorldSizeMode, slot_among_all
from agent_client.agent.step_runner import Limits, StepDigest, StepRunner
from agent_client.collectives.compiling import never_compiled
from agent_client.collectives.cuda_streams import in_stream_order
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.observed import ObservedGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ConfigurationError, GroupDrained, first_line
from agent_client.healing.catch_up import Follower, HealMode
from agent_client.healing.healing import Healing, ServeMode, Transport
from agent_client.manager_client.child_manager import ManagerProcess
from agent_client.manager_client.client import ManagerLink
from agent_client.manager_client.exit_report import LastWords
from agent_client.progress.trace_file import make_progress
from agent_client.state.digest import Digests
from agent_client.state.scalers import Scalers
from agent_client.state.train_state import TrainState
from lighthouse_protocol.limits import QUORUM_TIMEOUT_S
from lighthouse_protocol.messages.membership import DistrustKind, Tag
from lighthouse_runtime.net.own_address import advertised_host

log = logging.getLogger(__name__)

APPLY_HINT = (
    "this rank's state is torn: it heals before its gradients count again. A script that catches errors of "
    "optimizer.step() may go on; one that skips a committed step must not: vote no before (agent.report_error)"
)


class Agent(AgentTogether):
    """`timeout_s` bounds each collective and each vote, `connect_timeout_s` each of the three parts of meeting the
    peers of a new quorum (peers.py), `quorum_timeout_s` each quorum, `heal_timeout_s` a transfer of state. `serve` says
    how this rank's state is given to a peer: "snapshot" copies it, "hold" delays its next write until it is read,
    "auto" copies where memory allows. `heal_over`: http or process_group. `heal_mode`: "stall": the others wait while
    this group heals; "catch_up": nobody waits, it heals beside its steps (follower.py). `manager_returns_within_s` is
    how long a manager that has ended is waited for, unless this rank has started it. `world_size_mode` says what counts
    in a step, and `world_size` how much of it (world_size.py). `process_group`: gloo, isolated or nccl
    (process_group/choice.py). `check_state_every`: so many steps apart ranks compare a part of their parameters with
    their peers' (comparison.py), 0: never; the same in every replica group, else the largest counts, and nothing is
    compared where one says 0.

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
        quorum_timeout_s: float = QUORUM_TIMEOUT_S,
        heal_timeout_s: float = 300.0,
        serve: str = "auto",
        heal_over: str = "http",
        max_consecutive_discards: int = 30,
        manager_returns_within_s: float = 10.0,
        world_size_mode: str = WorldSizeMode.DYNAMIC,
        world_size: int = 0,
        process_group: str = "gloo",
        advertise: str | None = None,
        heal_mode: str = HealMode.STALL,
        check_state_every: int = 16,
    ) -> None:
        if (group_world_size > 1) != (group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")
        if check_state_every < 0:
            raise ConfigurationError(f"check_state_every: {check_state_every} steps; 0 compares nothing")
        counting = WorldSize(WorldSizeMode(world_size_mode), world_size)
        machine = StepMachine(world_size=counting, is_alone=group_world_size == 1)
        follows = HealMode(heal_mode) is HealMode.CATCH_UP
        self._follower = Follower(state, machine, lambda lead: self._healing.fetch_beside(lead)) if follows else None
        self.state, self.group_rank, self.group_world_size = state, group_rank, group_world_size
        self._group, self._manager_process, self._timeout_s = group, manager_process, timeout_s
        self._host = host = advertised_host(manager_address, advertise)
        times = {"connect_timeout_s": connect_timeout_s, "timeout_s": timeout_s}
        self._peers = Peers(group_rank, host, **times, process_group=process_group)
        self._healing = Healing(
            state, group_rank, host, heal_timeout_s, serve=ServeMode(serve), transport=Transport(heal_over)
        )
        self._thread = BackgroundThread(f"lighthouse agent {group_rank}")
        self._machine = machine
        worker, returns_s = secrets.token_hex(6), 0.0 if manager_process else manager_returns_within_s
        self._progress = make_progress(group_rank)
        self._manager = ManagerLink(
            manager_address,
            group_rank,
            worker,
            self._revoke,
            on_group_lost=self._lose_group,
            returns_within_s=returns_s,
            progress=self._progress,
        )
        self._last_words = LastWords(self._manager.report)
        self._last_words.listen()
        self._groups_for_torch = itertools.count()
        self._round: Future[None] | None = None
        self._asks_late = False
        self._reduce_again: Callable[[], None] | None = None
        self._parts: list[StepPart] = []
        self._on_commit: list[Callable[[int], object]] = []
        self._untold: int | None = None
        self._began_late = False
        limits = Limits(timeout_s, quorum_timeout_s, heal_timeout_s, max_consecutive_discards)
        parts = (machine, self._manager, self._peers, self._healing, group)
        self._runner = StepRunner(
            *parts, limits, manager_process, self._follower, self._progress, check_every=check_state_every
        )
        self._state_digests, self._gradient_digests = Digests(), Digests()
        self._applying, self._scalers = Applying(), Scalers(state)
        self._hooks = self._watch_optimizers()
        close_at_end(self)

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
        self._last_words.speak(e)
        self.close()

    def close(self) -> None:
        """Leave: end the collectives, the connections and, if this rank started it, the manager.

        Peers that are still in this rank's last step are waited for. An Agent that nobody closes leaves when the
        interpreter ends.
        """
        was_closed(self)
        for hook in self._hooks:
            hook.remove()
        self._last_words.fall_silent()
        self._manager.close(self._machine.next_step)
        self._peers.drop()
        if self._follower is not None:
            self._follower.close()
        self._thread.close(5.0)
        self._peers.close()
        self._healing.close()
        if self._group is not None:
            self._group.abort()
        if self._manager_process is not None:
            self._manager_process.stop()

    # -- what a script asks

    @property
    def is_participating(self) -> bool:
        """Whether this rank's gradients count in the step under way."""
        self.wait_quorum()
        return self._machine.contributes

    @property
    def quorum_step(self) -> int | None:
        """The step that the participants of the step under way are in; where this rank heals, not yet its own.

        Waits for the quorum; None if there is none.
        """
        self.wait_quorum()
        return self._machine.assignment.max_step if self._machine.assignment else None

    @never_compiled
    def slots(self) -> list[tuple[int, int]]:
        """(place, number of places) of each microbatch that is this rank's in the step under way.

        In DYNAMIC mode one, by the last quorum; the step is begun only where this rank may have to heal. In the others
        this begins the step and waits for its quorum; a group that does not count has one microbatch, too.
        """
        if self.world_size_mode is WorldSizeMode.DYNAMIC:
            if self._may_heal:
                self.start_quorum()
            return [self.last_slot()]
        self.start_quorum()
        self.wait_quorum()
        return self._machine.share.slots(self.group_rank, self.group_world_size)

    def slot(self) -> tuple[int, int]:
        """The only one of `slots()`. Raises ConfigurationError in CONSTANT_BATCH mode, where it may be one of many."""
        if self.world_size_mode is WorldSizeMode.CONSTANT_BATCH:
            raise ConfigurationError(
                "constant_batch: a step may have several microbatches; see microbatches(), slots()"
            )
        [slot] = self.slots()
        return slot

    @never_compiled
    def last_slot(self) -> tuple[int, int]:
        """(place, number of places) of this rank among all ranks of the last quorum; waits for the first one."""
        if self._runner.last is None:
            self.start_quorum()
            self.wait_quorum()
        return slot_among_all(self._runner.last, self.group_rank, self.group_world_size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin where that checkpoint was made; its model and optimizer must have been loaded. Between two steps."""
        if self._machine.phase is not Phase.IDLE:
            raise AgentError(f"load_state_dict: a step is under way ({self._machine.phase}); call it between two steps")
        self._machine.installed(state_dict["step"], state_dict["tag_quorum_id"], state_dict["batches_committed"])
        self._scalers.forget()

    @never_compiled
    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over the ranks of this replica group, in place; each of them must call it. Raises RuntimeError."""
        if self._group is not None:
            entry = self._progress.numbers.inside()
            self._thread.submit(lambda: self._runner.sum_over_group(tensor, entry)).result()
        return tensor

    def group_for_torch(self) -> ObservedGroup:
        """The ranks of this replica group, for a module of torch's that replicates inside it."""
        group = self._group or GlooGroup(
            HashStore(), 0, 1, self._host, connect_timeout_s=self._timeout_s, timeout_s=self._timeout_s
        )
        return ObservedGroup(group.for_torch(f"torch/{next(self._groups_for_torch)}"), self._progress)

    # -- one step

    @never_compiled
    def start_quorum(self) -> None:
        """Begin a step: ask for its quorum. Once a step; further calls do nothing.

        Where the last step was committed, this happens in the background. Where this rank may have to heal, the quorum
        is waited for, and a peer's state is installed when this returns. A loop need not call it: a forward pass of our
        modules, an all_reduce and the vote begin a step as well; but what is computed before does not count in a step
        in which this rank heals. A step whose backward pass was given up (it raised, and the script went on) is
        discarded first. Raises AgentError if a peer's state does not fit, or can never be had.
        """
        if self._machine.is_in_backward and not _is_in_backward():
            self.should_commit()
        self._start(has_computed=_is_in_backward())

    def ask_late(self) -> None:
        """From now on a step is long, and what it is made of is taken when its quorum is known. That is asked for when
        it begins, and not with the last one's vote; a group that heals in it adds zeros: it has done nothing of it."""
        self._manager.asks_ahead = False
        self._asks_late, self._runner.counts_at_once = True, False

    @never_compiled
    def wait_quorum(self) -> None:
        """Until the quorum of this step is known, its process group made and a peer's state received.

        Raises AgentError if this rank can never get one.
        """
        if self._round is not None:
            self._await("quorum", self._round)

    @never_compiled
    def all_reduce(self, tensor: torch.Tensor, *, within_group: bool = True, name: str = "") -> "Future[torch.Tensor]":
        """The mean over the contributing participants, and over the ranks of the group, in place.

        `within_group` False: not over the ranks of the group, for what is sharded among them. A lost peer does not fail
        the future: it marks the step, which is then discarded, and leaves `tensor` undefined. `name`: which part of the
        script's this is; in the first step under a quorum all participants must do the same, or `should_commit` raises.
        """
        self._start(has_computed=True)
        self._machine.computes()
        entry, runner = self._progress.numbers.over(), self._runner
        return self._thread.submit(in_stream_order(tensor, lambda: runner.reduce(tensor, within_group, entry, name)))

    @never_compiled
    def report_error(self, error: BaseException | str) -> None:
        """This step must not commit."""
        reason = str(error)
        self._thread.submit(lambda: self._machine.erred(reason)).result()

    @never_compiled
    def should_commit(self) -> bool:
        """Vote, and learn the decision of all ranks of the group.

        True: apply the gradients now. Raises ScriptMismatch if the other participants do something else in this step,
        and AgentError after `max_consecutive_discards`, or if this rank voted yes and cannot learn the decision.
        """
        if self._machine.phase is Phase.VOTED:
            raise AgentError(
                "the decision of this rank's last vote is not known, so it cannot vote on another step; "
                "end this process, so that its group is restarted: the first error says why"
            )
        if self._machine.is_in_backward:
            self._give_up()
        self._start(has_computed=True)
        while not (is_committed := self._finish_round()) and self._reduce_again and self._machine.is_salvageable:
            self._begin_round()
            self.wait_quorum()
            self._reduce_again()
        for part in self._parts:
            part.settle(is_committed=is_committed)
        self._untold = self._machine.step if is_committed else None
        if self._began_late and self._machine.was_told_late:
            self.start_quorum()  # a loop that begins its steps by a reduction would be late in the next one, too
        return is_committed

    @contextlib.contextmanager
    def applying(self) -> Generator[None]:
        """The block applies a step that was committed. An exception that leaves it leaves the state torn: this rank
        heals before it counts again, whether or not the script goes on.

        For scripts that apply by other means than an optimizer's step(); FaultTolerantOptimizer, LocalSGD and DiLoCo
        do so by themselves.
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
        """Call `callback(step)` after each committed step: `step` is `current_step` as it is then, counted from 1.

        On the script's thread, after FaultTolerantOptimizer has applied the step; where the script applies it itself,
        when the next step begins. Never for a discarded step. A rank that catches up has not applied it yet
        (`agent.catches_up`). What the callback raises leaves step().
        """
        self._on_commit.append(callback)

    @never_compiled
    def tell_commit(self) -> None:
        """The last committed step is applied: tell those that wait for it, once. For optimizers."""
        step, self._untold = self._untold, None
        if step is not None:
            for callback in self._on_commit:
                callback(step)

    def follow(self, optimizer: Optimizer) -> Follower | None:
        """What moves `optimizer` after a commit; None: it is always moved by the step's own gradients."""
        if self._follower is not None:
            self._follower.attach(optimizer)
        return self._follower

    def refuse_catch_up(self, what: str) -> None:
        """Raises ConfigurationError if this rank may catch up, which `what` cannot."""
        if self._follower is not None:
            raise ConfigurationError(f"heal_mode catch_up: not with {what}; use heal_mode='stall'")

    def salvage_by(self, reduce_again: Callable[[], None]) -> None:
        """A step that has lost a peer is tried again under the next quorum, with what it has computed already:
        `reduce_again` reduces that anew. Raises ConfigurationError where a step's share depends on its quorum."""
        if self.world_size_mode is WorldSizeMode.CONSTANT_BATCH:
            raise ConfigurationError("salvage: in constant_batch mode another quorum means other microbatches")
        self._reduce_again = reduce_again

    # -- for modules and optimizers

    def add_part(self, part: StepPart) -> None:
        """`part` belongs to every step from now on."""
        self._parts.append(part)

    @property
    def forward_begins(self) -> bool:
        """Whether a forward pass will begin the next step."""
        return any(part.begins_steps for part in self._parts)

    @never_compiled
    def computes(self, *, accumulates: bool = False) -> None:
        """Something of a step begins, and so does the step, where none is under way."""
        self.start_quorum()
        self._machine.computes(accumulates=accumulates)

    @never_compiled
    def backward_reduces(self) -> None:
        """A backward pass reduces; `backward_ended` follows, unless it is given up."""
        self._machine.is_in_backward = True

    @never_compiled
    def backward_ended(self) -> None:
        self._machine.is_in_backward = False

    @property
    def tag(self) -> Tag:
        """Of the state that this rank works at."""
        return self._machine.tag

    @property
    def has_peers(self) -> bool:
        """Whether the quorum of the step under way has other participants. It must be known."""
        assignment = self._machine.assignment
        return assignment is not None and assignment.replica_world_size > 1

    @never_compiled
    def take_from_first(self, packed: torch.Tensor) -> "Future[torch.Tensor]":
        """The uint8 `packed` of the first participant that counts, in place; its byte 0 is 1 at all that call this."""
        entry = self._progress.numbers.over()
        return self._thread.submit(in_stream_order(packed, lambda: self._runner.take_from_first(packed, entry)))

    def _give_up(self) -> None:
        """The peers learn it at once: they wait for what this rank will not reduce."""
        self._machine.gives_up()
        self._peers.drop()
        for part in self._parts:
            part.give_up()

    def _start(self, *, has_computed: bool) -> None:
        """`has_computed`: something was, before the step has begun. A state that came now would not be that of it."""
        if self._machine.phase is not Phase.IDLE:
            return
        self._check_applied()
        self.tell_commit()
        self._began_late, heals_first = has_computed, self._may_heal and not has_computed
        if not self._machine.was_committed and not has_computed:  # a loss that is scaled already would not fit
            self._scalers.take_back()
        self._begin_with_state()
        self._begin_round(heals_first=heals_first)
        if heals_first:
            self._heal_first()

    @property
    def _may_heal(self) -> bool:
        """Whether the next quorum may tell this rank to; then it is waited for before anything is computed."""
        return self._asks_late or self._machine.may_heal or self._machine.tag_quorum_id is None or self.catches_up

    def _begin_with_state(self) -> None:
        """The step begins with the state as it is now."""
        if self._follower is not None:
            self._follower.begin_step()
        self.state.begin_step()
        self._scalers.begin_step()
        self._runner.digest = self._digest_state()
        self._progress.step(self._machine.step)
        self._machine.begin()

    def _heal_first(self) -> None:
        try:
            self.wait_quorum()
            if self._runner.install():
                self._begin_with_state()
        except GroupDrained:
            raise
        except AgentError as e:
            self._last_words.speak(e)  # before the peers see their connections end
            self._peers.drop()
            raise

    def _begin_round(self, *, heals_first: bool = False) -> None:
        self._machine.ask(heals_first=heals_first)
        self._round = self._thread.submit(lambda n=self._progress.numbers.over_groups: self._runner.begin(n))

    def _finish_round(self) -> bool:
        self.wait_quorum()
        for part in self._parts:
            part.agree()
        if self._runner.compares or not (self._machine.has_reduced and self._thread.is_idle):
            self._await("peers", self._thread.submit(self._runner.reach_all))
        if self._runner.compares_gradients:
            self._compare_gradients()
        is_committed = self._runner.finish()
        if is_committed:
            self._applying.committed(self._machine.step - 1)
        return is_committed

    # -- within

    def _digest_state(self) -> StepDigest | None:
        """Of the state that a step begins with, where it is compared and this rank holds it."""
        machine, every = self._machine, self._runner.check_every
        if not every or machine.step % every or machine.is_torn or self.catches_up:
            return None
        return StepDigest(machine.tag, self._state_digests.take(self.state.compared(), machine.step // every))

    def _compare_gradients(self) -> None:
        """What is about to be applied here, with what the contributors are about to apply."""
        number = self._machine.step
        digest = self._gradient_digests.take(self.state.gradients_of(), number, lambda parameter: parameter.grad)
        done = self._thread.submit(lambda: self._runner.compare_gradients(digest))
        reason = self._await("peers", done)
        if reason and self._follower is not None:
            self._follower.reject(reason)

    def _watch_optimizers(self) -> list[Any]:
        """Those of this process: which of them step, and whether they end."""
        state, applying = self.state, self._applying

        def is_registered(optimizer: Any) -> bool:
            optimizers = (state.optimizer, *state.others.values())
            return any(optimizer is getattr(other, "wrapped", other) for other in optimizers)

        def began(optimizer: Any, *_: object) -> None:
            name = type(optimizer).__name__
            applying.optimizer_began(id(optimizer), name, is_registered=is_registered(optimizer))

        def ended(optimizer: Any, *_: object) -> None:
            name = type(optimizer).__name__
            applying.optimizer_ended(id(optimizer), name, is_registered=is_registered(optimizer))

        return [register_optimizer_step_pre_hook(began), register_optimizer_step_post_hook(ended)]

    def _check_applied(self) -> None:
        if wrong := self._applying.begins(_may_skip):
            self._tear(wrong)

    def _tear(self, text: str) -> None:
        log.error("%s; %s", text, APPLY_HINT)
        self._machine.tear(DistrustKind.NOT_APPLIED, f"rank {self.group_rank}: {text}")
        if self._follower is not None:
            self._follower.torn()

    def _revoke(self, quorum_id: int | None, reason: str) -> None:
        """On the watch's thread."""
        self._peers.revoke(quorum_id, reason)
        self._healing.revoke(quorum_id, reason)

    def _lose_group(self, reason: str) -> None:
        """On the watch's thread."""
        self._revoke(None, reason)
        if self._group is not None:
            self._group.abort()


def _may_skip() -> bool:
    """A GradScaler leaves out the steps whose gradients overflow, in all ranks alike."""
    return any(issubclass(type(thing), torch.amp.GradScaler) for thing in gc.get_objects())


def _is_in_backward() -> bool:
    """Whether this thread runs a backward pass: one that computes a forward pass again begins nothing."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
