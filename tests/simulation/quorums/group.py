"""A replica group's host: its manager, its ranks, the supervisor that restarts them, and its checkpoints on disk."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from agent_client.step.rules.machine import Phase
from lighthouse_protocol.messages.membership import Participant, Tag
from lighthouse_protocol.refusals import DuplicateReplica, Unrecoverable, WrongState
from tests.simulation.quorums.manager import ManagerProcess
from tests.simulation.quorums.manager_checks import Votes
from tests.simulation.quorums.rank import Rank, Snapshot
from tests.simulation.quorums.torchft_manager import TorchftManager
from tests.simulation.world import Died, Process

if TYPE_CHECKING:
    from tests.simulation.network import End
    from tests.simulation.quorums.lighthouse import Lighthouse
    from tests.simulation.quorums.simulation import QuorumSimulation

KILLS_TAKE_S = 0.05
CHECKPOINTS_KEPT = 3
LOADS_APART = 0.2
RECONNECTS_S = 1.0
CRASHED_S = (0.05, 0.5, 3.0)
VANISHES_SHARE = 0.3  # their hosts lose their power
TOLD_WITHIN_S = 15.0  # 10 s by a slow clock, and what it takes to notice
ENDS_ASKING_SHARE = 0.4
NOTICED_WITHIN_S = 0.1  # the death of a rank, by its manager


class Group:
    def __init__(
        self, simulation: "QuorumSimulation", replica_id: str, number: int, *, is_torchft: bool = False
    ) -> None:
        self.world = simulation.world
        self.plan = simulation.plan
        self.network = simulation.network
        self.lighthouse = simulation.lighthouse
        self.checkers = simulation.checkers
        self.collectives = simulation.collectives
        self._simulation = simulation
        self.replica_id = replica_id
        self.name = replica_id
        self.host = f"host-{number}"
        self.address = f"10.0.{number // 250}.{number % 250 + 1}:29511"
        self.store_address = f"10.0.{number // 250}.{number % 250 + 1}:29600"
        self.size = simulation.plan.group_world_size
        self.is_torchft = is_torchft
        share = 0.0 if is_torchft else simulation.plan.catch_up
        self.may_catch_up = share > 0 and simulation.world.random.random() < share
        self._manager: ManagerProcess | TorchftManager | None = None
        self.ranks: list[Rank] = []
        self.shrinks = False
        self.is_leaving = False
        self.has_gone = False
        self._script_ends_at: int | None = None
        self.ends_asking = False  # its script begins one step more than it does
        self.ended_at: float | None = None
        self._stays_down = False
        self._restart_at: float | None = None
        self.must_agree = False
        self.finds: Lighthouse | None = None  # another one than it should
        self.doubles_sessions_until = 0.0
        self.is_apart = False  # its ranks began with states that do not go together, or are healing
        self.cancels: list[Phase] = []
        self.crashes_in: Phase | None = None
        self.doubles = 0  # of the next calls
        self.is_answered_back = False
        self.has_lied = False  # a rank of it
        self.manager_returns = self.has_lost_manager = False
        self.votes: Votes = {}  # of its present ranks, as its managers have heard them
        self._saved: list[dict[int, Snapshot]] = [{} for _ in range(self.size)]  # by step
        self.begins_with: Snapshot | None = None  # whatever is planned

    @property
    def manager(self) -> ManagerProcess | TorchftManager:
        """The present manager, from the first start on."""
        assert self._manager is not None
        return self._manager

    @property
    def is_up(self) -> bool:
        return self._manager is not None and self._manager.is_up and all(rank.is_up for rank in self.ranks)

    @property
    def wire_id(self) -> str:
        return self.manager.wire_id if isinstance(self.manager, TorchftManager) else self.replica_id

    @property
    def processes(self) -> "list[Process]":
        return [self.manager, *self.ranks]

    def connect_to_lighthouse(
        self, manager: Process, connected: "Callable[[End], None]", failed: Callable[[], None]
    ) -> None:
        lighthouse, connected, failed = (self.finds or self.lighthouse).find(self, connected, failed)
        lighthouse.connect(
            manager, connected, failed, shadowed_s=max(0.0, self.doubles_sessions_until - self.world.now)
        )

    @property
    def is_training(self) -> bool:
        return self.is_up and not self.is_leaving and not self.has_gone

    # -- starts

    def start(self) -> None:
        """Start a manager and its ranks, unless they are alive."""
        self._restart_at = None
        if self.has_gone:
            return
        self.network.boot(self.host)
        if self._manager is None or not self._manager.is_up:
            self._end_ranks()
            life = f"{self.name}-{self._number()}"
            self._manager = TorchftManager(self, life) if self.is_torchft else ManagerProcess(self, life)
            self.manager.log("starts")
        self._start_ranks()

    def _start_ranks(self) -> None:
        self._end_ranks()
        self.manager_returns = self.has_lost_manager = self.has_lied = False
        self.votes = {}
        loads = self.world.random.random() < self.plan.from_checkpoint
        found = self._load() if loads else [None] * self.size
        if self.begins_with is not None:
            found = [self.begins_with] * self.size
        self.is_apart = len({snapshot and (snapshot.step, snapshot.tag_quorum_id) for snapshot in found}) > 1
        self.ranks = [self._start_rank(rank, snapshot) for rank, snapshot in enumerate(found)]

    def _load(self) -> list[Snapshot | None]:
        """Return the newest checkpoint that all ranks have, or each rank's own newest one, as some scripts do."""
        if not self.must_agree and self.world.random.random() < LOADS_APART:
            return [saved[max(saved)] if saved else None for saved in self._saved]
        self.must_agree = False
        steps = set.intersection(*(set(saved) for saved in self._saved))
        for step in sorted(steps, reverse=True):
            found = [saved[step] for saved in self._saved]
            if len({snapshot.tag_quorum_id for snapshot in found}) == 1:
                return list(found)
        return [None] * self.size

    def _start_rank(self, group_rank: int, found: Snapshot | None) -> Rank:
        initial = 1 if not self.plan.init_sync else self.world.random.getrandbits(32)
        snapshot = found or Snapshot(initial, 0, 0)
        rank = Rank(self, group_rank, f"w{self._number()}", snapshot)
        rank.log(f"starts at step {snapshot.step} of quorum {snapshot.tag_quorum_id}")
        return rank

    def _number(self) -> int:
        return self._simulation.next_number()

    def restart_rank(self, rank: Rank, back_after_s: float | None) -> None:
        """Kill a rank, and start it again unless `back_after_s` is None.

        The other ranks live on. A restarted manager that does not know all ranks yet could not notify them.
        """
        if not (self.manager.knows(rank) and all(map(self.manager.has_met, self.ranks))):
            back_after_s = RECONNECTS_S
        rank.has_vanished = self.world.random.random() < VANISHES_SHARE
        self._stays_down = True
        rank.kill()
        self._stays_down = False
        if back_after_s is not None:
            self.world.after(back_after_s, self._start_alone, rank)
        elif isinstance(self.manager, ManagerProcess):
            self.manager.check_gone(rank, TOLD_WITHIN_S)

    def _start_alone(self, old: Rank) -> None:
        if old in self.ranks and all(rank.is_up for rank in self.ranks if rank is not old):
            saved = self._saved[old.group_rank]
            self.is_apart = True
            self.ranks[old.group_rank] = self._start_rank(old.group_rank, saved[max(saved)] if saved else None)

    # -- ends

    def crash(self) -> None:
        """Kill one of the group's processes. A manager dies between two answers."""
        if not self.is_training:
            return
        dies = self.world.random.choice(self.processes)
        dies.log("crashes")
        if isinstance(dies, ManagerProcess):
            dies.dies_in = self.world.random.randrange(3)
        else:
            dies.kill()

    def restart_manager(self, back_after_s: float) -> None:
        """Kill the manager, and start it again below its ranks if they are still alive."""
        old = self.manager
        self.manager_returns = self.has_lost_manager = True
        old.kill()
        self.world.after(back_after_s, self._start_manager, old)

    def crash_manager(self) -> None:
        self.restart_manager(self.world.random.choice(CRASHED_S))
        raise Died

    def _start_manager(self, old: "ManagerProcess | TorchftManager") -> None:
        if self._manager is old and not self.has_gone and self._restart_at is None:
            self._manager = ManagerProcess(self, f"{self.name}-{self._number()}")
            self.manager.log("starts below its ranks")
            for rank in self.ranks:  # it cannot tell the mates of one that it has never met
                if not rank.is_up:
                    self.world.after(RECONNECTS_S, self._start_alone, rank)

    def kill(self) -> None:
        """Kill the manager and all ranks at once. The supervisor starts them again."""
        self._restart_later()
        if self.manager.is_up:
            self.manager.kill()
        self._end_ranks()

    def vanish(self, back_after_s: float | None = None) -> None:
        """Turn the power of the host off."""
        if back_after_s is not None:
            self._restart_in(back_after_s)
        for process in (self.manager, *self.ranks):
            self.network.vanish(process)
        for rank in self.ranks:
            rank.has_vanished = True
        self.kill()

    def rank_died(self, rank: Rank) -> None:
        if self.manager.is_up:
            self.manager.on_rank_death(rank)
        if rank in self.ranks and not self._stays_down:
            self._restart_later()

    def _end_ranks(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.kill()

    def _restart_later(self) -> None:
        if self._restart_at is None and not self.has_gone and not self.is_leaving:
            self._restart_in(self.plan.restart_s * self.world.random.uniform(0.5, 1.5) + KILLS_TAKE_S)

    def _restart_in(self, delay_s: float) -> None:
        self._restart_at = at = self.world.now + delay_s
        self.world.after(max(0.0, delay_s - KILLS_TAKE_S), self._end_before, at)
        self.world.after(delay_s, self.start)

    def _end_before(self, restart_at: float) -> None:
        """Kill remaining ranks before the new ones start."""
        if self._restart_at == restart_at:
            for rank in self.ranks:
                rank.kill()

    # -- leaving

    def drain(self) -> None:
        """Drain the group, in an event of its manager: if the manager dies of it, the supervisor does the rest."""
        self.is_leaving = True
        self.manager.after(0, self.manager.drain, "drained")

    def end_script(self, step: int) -> None:
        """Let the ranks do all steps below `step`, and end in good order."""
        self.is_leaving, self._script_ends_at = True, step
        self.ends_asking = Random(f"ends asking {self.plan.seed} {self.name} {step}").random() < ENDS_ASKING_SHARE

    def script_ends(self, step: int) -> bool:
        return self._script_ends_at is not None and step >= self._script_ends_at

    def has_left(self, manager: ManagerProcess | TorchftManager) -> None:
        if manager is self.manager:
            self.end_for_good()

    def end_for_good(self) -> None:
        self.has_gone = True
        self.ended_at = self.world.now
        if self.manager.is_up:
            self.manager.kill()
        self._end_ranks()

    def come_back(self, *, keeps_manager: bool = False) -> None:
        """Start a group again that has left."""
        if self.manager.is_up and not keeps_manager:
            self.manager.kill()
        self._end_ranks()
        self.is_leaving = self.has_gone = False
        self._script_ends_at = None
        self.start()

    # -- what ranks need

    @property
    def whole_state(self) -> Tag | None:
        """The tag of the state that all ranks hold and could send to another group, or None."""
        held = {rank.held for rank in self.ranks if not rank.machine.is_torn}
        is_whole = self.is_up and len(held) == 1 and not any(rank.machine.is_torn for rank in self.ranks)
        tag = held.pop() if is_whole else None
        return tag if tag is not None and tag.step and tag.quorum_id is not None else None

    @property
    def is_in_standing_quorum(self) -> bool:
        """True if the last quorum that the manager received stands."""
        accepted = self.manager.accepted if isinstance(self.manager, ManagerProcess) else None
        return accepted is not None and accepted.stands

    def is_as_it_was(self, moment: float) -> bool:
        """Return whether no rank has restarted since that time."""
        return all(rank.began_at <= moment for rank in self.ranks)

    def has_held_since(self, moment: float) -> bool:
        """Return whether the ranks hold a whole state and none has restarted since that time."""
        return self.whole_state is not None and self.is_as_it_was(moment)

    @property
    def why_undecided(self) -> str:
        """The fault because of which a rank may not learn a decision, or empty if there is none."""
        if self.has_lied:
            return "a rank of it has lied"
        return "the manager that knew it has died" if self.has_lost_manager else ""

    def why_refused(self, error: Exception) -> str:
        """Return the fault because of which ranks may end after that refusal, or empty if there is none."""
        if self.has_lied:
            return "a rank of it has lied"
        if isinstance(error, DuplicateReplica):
            return "another group has its id" if self._simulation.has_twin(self) else ""
        if isinstance(error, WrongState):  # it was told to ask again until a group is back, and has done so
            return self._why_unrecoverable({rank.held.quorum_id for rank in self.ranks if rank.held is not None})
        return self._why_unrecoverable(set()) if isinstance(error, Unrecoverable) else ""

    def _why_unrecoverable(self, missed: set[int | None]) -> str:
        """Return the fault because of which the ranks hold no common state, or empty if they could heal.

        They could heal from a group of their quorum with a whole state whose ranks have not lied. A group alone in its
        quorum could heal from any group that holds what it did not apply, or what a quorum of `missed` has committed.
        """
        assert isinstance(self.manager, ManagerProcess)
        torn = [rank.machine for rank in self.ranks if rank.machine.is_torn]
        quorum = self.manager.handed
        if quorum is None or not (torn or self.is_apart):
            return ""
        others = [p for p in quorum.participants if p.replica_id != self.replica_id]
        noticed_at = self.checkers.told_at[quorum.quorum_id] - NOTICED_WITHIN_S
        if any(self._could_heal_from(other, noticed_at) for other in others):
            return ""
        lost = missed | {machine.torn_under for machine in torn}
        if not others and any(state.quorum_id in lost for state in self._simulation.whole_states()):
            return ""
        return "a commit was not applied" if torn else "states that do not go together"

    def _could_heal_from(self, member: Participant, since: float) -> bool:
        """Return whether a member could send its state. A member at step 0 may have trained alone since it joined."""
        group = self._simulation.find_group(member.address)
        return group is None or (member.step > 0 and group.has_held_since(since) and not group.has_lied)

    def find_rank(self, address: str, group_rank: int) -> Rank | None:
        return self._simulation.find_rank(address, group_rank)

    def save(self, rank: Rank) -> None:
        step = rank.machine.step
        if step % self.plan.checkpoint_every == 0:
            saved = self._saved[rank.group_rank]
            saved[step] = rank.snapshot()
            for old in sorted(saved)[:-CHECKPOINTS_KEPT]:
                del saved[old]
