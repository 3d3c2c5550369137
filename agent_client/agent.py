"""Agent: what a training script holds. One object per rank; it asks for quorums, heals, reduces and votes.

Everything of a step but the vote runs on one background thread, in order: the quorum, the process group, the transfer
of state, the collectives. So the quorum overlaps the forward pass, and the first collective waits for it.
"""

import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import HashStore
from torch.optim import Optimizer

from agent_client.environment import Environment
from agent_client.errors import AgentError, ConfigurationError
from agent_client.evaluation import AgentTogether
from agent_client.follower import Follower, HealMode
from agent_client.healing import Healing, ServeMode, Transport
from agent_client.interpreter_end import close_at_end, was_closed
from agent_client.last_words import LastWords
from agent_client.manager_link import ManagerLink
from agent_client.manager_process import ManagerProcess
from agent_client.mark_log import make_progress
from agent_client.meeting import meet
from agent_client.peers import Peers
from agent_client.process_group.gloo import GlooGroup
from agent_client.process_group.observed import ObservedGroup
from agent_client.step import Phase, StepMachine
from agent_client.step_runner import Limits, StepRunner
from agent_client.streams import in_stream_order
from agent_client.train_state import TrainState
from agent_client.worker import BackgroundThread
from agent_client.world_size import WorldSize, WorldSizeMode, slot_among_all
from lighthouse_runtime.address import advertised_host


class Agent(AgentTogether):
    """`timeout_s` bounds each collective and each vote, `connect_timeout_s` meeting the peers of a new quorum,
    `quorum_timeout_s` each quorum, `heal_timeout_s` a transfer of state. `serve` says how this rank's state is given to
    a peer: "snapshot" copies it, "hold" delays its next write until it is read, "auto" copies where memory allows.
    `heal_over`: http or process_group. `heal_mode`: "stall": the others wait while this group heals; "catch_up": nobody
    waits, it heals beside its steps (follower.py). `manager_returns_within_s` is how long a manager that has ended is
    waited for, unless this rank has started it. `world_size_mode` says what counts in a step, and `world_size` how much
    of it (world_size.py). `process_group`: gloo, isolated or nccl (process_group/choice.py).

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
        serve: str = "auto",
        heal_over: str = "http",
        max_consecutive_discards: int = 30,
        manager_returns_within_s: float = 10.0,
        world_size_mode: str = WorldSizeMode.DYNAMIC,
        world_size: int = 0,
        process_group: str = "gloo",
        advertise: str | None = None,
        heal_mode: str = HealMode.STALL,
    ) -> None:
        if (group_world_size > 1) != (group is not None):
            raise ConfigurationError("group: a group of several ranks, and only such a one, needs its process group")
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
        self._reduce_again: Callable[[], None] | None = None
        limits = Limits(timeout_s, quorum_timeout_s, heal_timeout_s, max_consecutive_discards)
        parts = (machine, self._manager, self._peers, self._healing, group)
        self._runner = StepRunner(*parts, limits, manager_process, self._follower, self._progress)
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
        """Leave: end the collectives, the connections and, if this rank started it, the manager. An Agent that nobody
        closes leaves when the interpreter ends."""
        was_closed(self)
        self._last_words.fall_silent()
        self._manager.close()
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

    def slots(self) -> list[tuple[int, int]]:
        """(place, number of places) of each microbatch that is this rank's in the step under way.

        In DYNAMIC mode one, by the last quorum. In the others this begins the step and waits for its quorum; who does
        not count has one microbatch, too.
        """
        if self.world_size_mode is WorldSizeMode.DYNAMIC:
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

    def start_quorum(self) -> None:
        """Begin a step: ask for its quorum in the background. Once a step; further calls do nothing."""
        if self._machine.phase is not Phase.IDLE:
            return
        if self._follower is not None:
            self._follower.begin_step()
        self.state.begin_step()
        self._progress.step(self._machine.step)
        self._machine.begin()
        self._begin_round()

    def ask_late(self) -> None:
        """From now on a step is long: its quorum is asked for when it begins, and not with the last one's vote."""
        self._manager.asks_ahead = False

    def wait_quorum(self) -> None:
        """Until the quorum of this step is known, its process group made and a peer's state received.

        Raises AgentError if this rank can never get one.
        """
        if self._round is not None:
            self._await("quorum", self._round)

    def all_reduce(self, tensor: torch.Tensor, *, within_group: bool = True) -> "Future[torch.Tensor]":
        """The mean over the contributing participants, and over the ranks of the group, in place.

        `within_group` False: not over the ranks of the group, for what is sharded among them. A lost peer does not fail
        the future: it marks the step, which is then discarded, and leaves `tensor` undefined.
        """
        entry = self._progress.numbers.over()
        return self._thread.submit(in_stream_order(tensor, lambda: self._runner.reduce(tensor, within_group, entry)))

    def report_error(self, error: BaseException | str) -> None:
        """This step must not commit."""
        reason = str(error)
        self._thread.submit(lambda: self._machine.erred(reason)).result()

    def should_commit(self) -> bool:
        """Install a peer's state if there is one, vote, and learn the decision of all ranks of the group.

        True: apply the gradients now. Raises AgentError after `max_consecutive_discards`, or if this rank voted yes and
        cannot learn the decision.
        """
        while not (is_committed := self._finish_round()) and self._reduce_again and self._machine.is_salvageable:
            self._begin_round()
            self.wait_quorum()
            self._reduce_again()
        return is_committed

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

    def _begin_round(self) -> None:
        self._machine.ask()
        self._round = self._thread.submit(lambda n=self._progress.numbers.over_groups: self._runner.begin(n))

    def _finish_round(self) -> bool:
        self.wait_quorum()
        if not (self._machine.has_reduced and self._thread.is_idle):
            self._await("peers", self._thread.submit(self._runner.reach_all))
        return self._runner.finish()

    # -- within

    def _revoke(self, quorum_id: int | None, reason: str) -> None:
        """On the watch's thread."""
        self._peers.revoke(quorum_id, reason)
        self._healing.revoke(quorum_id, reason)

    def _lose_group(self, reason: str) -> None:
        """On the watch's thread."""
        self._revoke(None, reason)
        if self._group is not None:
            self._group.abort()
