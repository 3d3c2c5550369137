"""One run of a cluster from its seed: its groups, the faults, and the checks at the end."""

from collections.abc import Callable

from lighthouse_protocol.messages.membership import Tag
from tests.simulation.faults import Fault
from tests.simulation.quorums.checkers import Checkers
from tests.simulation.quorums.collectives import Collectives
from tests.simulation.quorums.faults import KINDS, draw_faults
from tests.simulation.quorums.faults.kinds import PATIENCE_S
from tests.simulation.quorums.group import Group
from tests.simulation.quorums.lighthouse import Lighthouse
from tests.simulation.quorums.lighthouse_checks import largest_allowed
from tests.simulation.quorums.plan import NAMES, QuorumPlan
from tests.simulation.quorums.promises import PROMISES
from tests.simulation.quorums.rank import Rank, Snapshot
from tests.simulation.quorums.two_lighthouses import TwoLighthouses
from tests.simulation.simulation import Simulation
from tests.simulation.world import Violation

BOOT_S = 3.0
LOOK_EVERY_S = 0.5
STEPS_TOGETHER = 5
SHOWN_FAULTS = 8
# The time after the last fault is due in which it must find a target and end.
FAULTS_OVER_S = 2 * PATIENCE_S
HELD_UP_S = (0.01, 0.1, 0.5)


class QuorumSimulation(Simulation):
    def __init__(self, plan: QuorumPlan, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(plan, KINDS, trace)
        self.plan = plan
        self.collectives = Collectives(self.world, self.network)
        self.checkers = Checkers(self.world, self.collectives)
        self.checkers.find_group = self.find_group
        site = TwoLighthouses if plan.has_two_lighthouses else Lighthouse
        self.lighthouse = site(self.world, self.network, plan.config, self.checkers)
        self._by_address: dict[str, Group] = {}
        self._groups_made = 0
        self._ongoing = 0
        self.groups = [self.add_group(NAMES[i], is_torchft=i < plan.torchft) for i in range(plan.groups)]
        self.twins: list[Group] = []
        self.strangers: list[Group] = []
        self.impostors: list[Lighthouse] = []
        self.faults = draw_faults(self)
        self.pending = 0
        self.last_fault_ends_at = 0.0
        self.settled = Settled(self)
        self.promise = PROMISES[plan.scenario](self)
        self.checkers.on_discard = self.promise.discarded

    def add_group(self, replica_id: str, *, is_torchft: bool = False) -> Group:
        """Create a group on a host of its own."""
        group = Group(self, replica_id, self._groups_made, is_torchft=is_torchft)
        self._groups_made += 1
        self._by_address[group.address] = group
        return group

    def add_stranger(self, begins_with: Snapshot | None = None) -> Group:
        """Start a group that comes once. The fault lasts until `end`."""
        group = self.add_group(f"stranger-{len(self.strangers):03d}")
        group.begins_with = begins_with
        self.strangers.append(group)
        self.groups.append(group)
        self.begin()
        group.start()
        return group

    def start_impostor(self, for_s: float) -> None:
        """Start a second lighthouse for a while. About half of the groups connect to it."""
        world = self.world
        impostor = Lighthouse(world, self.network, self.plan.config, self.checkers, f"impostor{len(self.impostors)}-")
        impostor.set_wall_clock(self.lighthouse.most_offset_s)  # it has no journal: its ids are safe by that alone
        self.impostors.append(impostor)
        impostor.start()
        self.begin()
        deceived = [group for group in self.groups if world.random.random() < 0.5] or self.groups[:1]
        for group in deceived:
            group.finds = impostor
            self._break_link(group)

        def end() -> None:
            assert impostor.process is not None
            impostor.process.kill()
            for group in deceived:
                group.finds = None if group.finds is impostor else group.finds
            self.end()

        world.after(for_s, end)

    def _break_link(self, group: Group) -> None:
        if group.is_up and group.manager.link is not None:
            self.network.break_(group.manager.link)

    # -- faults

    def schedule(self, fault: Fault) -> None:
        self.pending += 1
        super().schedule(fault)

    def may_fire(self) -> bool:
        return not self.plan.one_at_a_time or self.is_settled()

    def latest(self, fault: Fault) -> float:
        return fault.at + PATIENCE_S

    def before_fault(self, fault: Fault, target: object) -> None:
        group = target.site if isinstance(target, Rank) else target
        self.promise.fired(fault, group if isinstance(group, Group) else None)

    def after_fault(self, fault: Fault | None) -> None:
        self.pending -= 1
        if fault is not None:
            self.settled.forget()
            self.last_fault_ends_at = max(self.last_fault_ends_at, self.world.now + fault.for_s)

    def begin(self) -> None:
        self.pending += 1
        self._ongoing += 1

    def end(self) -> None:
        self.pending -= 1
        self._ongoing -= 1
        self.last_fault_ends_at = max(self.last_fault_ends_at, self.world.now)

    def is_settled(self) -> bool:
        """Return whether all groups train together, and had time to notice the last fault."""
        is_quiet = not self._ongoing and self.world.now >= self.last_fault_ends_at + self.plan.quiet_s
        return self.settled.is_settled() and is_quiet and self.lighthouse.is_up

    def find_group(self, address: str) -> Group | None:
        return self._by_address.get(address)

    def has_twin(self, group: Group) -> bool:
        return any(twin.replica_id == group.replica_id for twin in self.twins)

    def whole_states(self) -> list[Tag]:
        states = [group.whole_state for group in self._by_address.values()]
        return [state for state in states if state is not None]

    def find_rank(self, address: str, group_rank: int) -> Rank | None:
        group = self._by_address.get(address)
        ranks = group.ranks if group is not None else []
        return ranks[group_rank] if group_rank < len(ranks) else None

    def run(self) -> None:
        world = self.world
        world.after(world.random.random(), self.lighthouse.start)
        for group in self.groups:
            world.after(world.random.random() * BOOT_S, group.start)
        for fault in self.faults:
            self.schedule(fault)
        world.run(self.plan.faults_s)
        over_at = self.plan.faults_s + FAULTS_OVER_S
        while self.pending or world.now < self.last_fault_ends_at + 0.1:
            if world.now >= over_at:
                raise Violation(f"{self.pending} faults last beyond {over_at:.0f} s: {self.describe()}")
            world.run(world.now + LOOK_EVERY_S)
        world.log("", "no more faults")
        world.is_calm = True
        self._settle()
        never = [fault for fault in self.unfired if not world.counts[f"fault: {fault.what}"]]
        if never:  # others found whom they strike struck already, for too long
            raise Violation(f"faults that did not fire: {', '.join(map(str, never[:SHOWN_FAULTS]))}")
        self.promise.at_end()
        self._end_job()

    # -- S12

    def _end_job(self) -> None:
        """End all scripts after the same step, some of them late. All groups must do it under one quorum (S12)."""
        ranks = self.together()
        groups = [group for group in self.groups if not group.has_gone]
        if self.plan.torchft or not self.plan.config.stands or len(ranks) < len(groups) * self.plan.group_world_size:
            return
        if other := [group.name for group in groups if not group.is_in_standing_quorum]:
            raise Violation(f"S5 the last quorum does not stand, as {other} were told it: {self.describe()}")
        world = self.world
        last = max(rank.machine.step for rank in ranks) + world.random.randint(1, 3)
        for group in groups:
            group.end_script(last)
        for group in groups:
            late = world.random.choice((group.manager, *group.ranks))
            world.after(world.random.uniform(0, 4 * self.plan.step_s), late.pause, world.random.choice(HELD_UP_S))
        self.checkers.on_discard = self._discarded_at_the_end
        ends_at = world.now + self.plan.settle_s
        while any(rank.is_up for rank in ranks):
            if world.now >= ends_at:
                raise Violation(f"S12 {self.plan.settle_s:.0f} s after the end of the job: {self.describe()}")
            world.run(world.now + LOOK_EVERY_S)
        ends = {(rank.group_rank, rank.held, rank.state) for rank in ranks}
        if {rank.machine.step for rank in ranks} != {last} or len(ends) > self.plan.group_world_size:
            raise Violation(f"S12 all scripts end before step {last}: {self.describe()}")

    def _discarded_at_the_end(self, rank: Rank, quorum_id: int, step: int) -> None:
        raise Violation(
            f"S12 {rank.name} discards step {step} of quorum {quorum_id}, and all scripts end in good order"
        )

    # -- S5

    def _settle(self) -> None:
        world = self.world
        ends_at = world.now + self.plan.settle_s
        self.settled.forget()
        while not self.settled.is_settled():
            if world.now >= ends_at:
                if not self._can_train():
                    return  # the others were told that the job has ended, and are gone
                raise Violation(f"S5 {self.plan.settle_s:.0f} s after the last fault: {self.describe()}")
            world.run(world.now + LOOK_EVERY_S)

    def together(self) -> list[Rank]:
        """Return the ranks of the largest possible quorum if they are in the newest one, or none."""
        config = self.plan.config
        living = [group for group in self.groups if not group.has_gone]
        newest = self.checkers.newest_id
        is_in: Callable[[Rank], bool] = lambda rank: rank.quorum_id == newest and not rank.catches_up  # noqa: E731
        inside = [g for g in living if g.ranks and all(map(is_in, g.ranks))]
        expected = largest_allowed(range(len(living) + 1), config)
        # A quorum of a size that another configuration allowed stands until something else changes it.
        is_kept = "change_sizes" in self.plan.mix and len(inside) == len(living)
        is_all = len(inside) == expected or is_kept
        return [rank for group in inside for rank in group.ranks] if is_all else []

    def _can_train(self) -> bool:
        living = [group for group in self.groups if not group.has_gone]
        return len(living) == len(self.groups) or largest_allowed(range(len(living) + 1), self.plan.config) > 0

    def describe(self) -> str:
        """Describe all processes for a failure's message."""
        process = self.lighthouse.process
        parts: list[str] = []
        if process is not None:
            standing = process.machine.standing
            parts.append(
                f"lighthouse {standing.phase} {standing.quorum and standing.quorum.quorum_id}"
                f" verdict {process.machine.decision.verdict} joined {[m.replica_id for m in process.machine.joins]}"
            )
        for group in self.groups:
            ranks = [f"{r.machine.phase}@{r.machine.step}/{r.quorum_id}+{r.commits}-{r.discards}" for r in group.ranks]
            parts.append(
                f"{group.name}: {group.manager.describe()} {' '.join(ranks)}{'' if group.is_up else ' (down)'}"
            )
        return "; ".join(parts)


class Settled:
    """Notices when all live groups make steps in one quorum, without a discard and without another quorum."""

    def __init__(self, simulation: QuorumSimulation) -> None:
        self._simulation = simulation
        self._mark: dict[Rank, int] = {}
        self._seen = (-1, -1)

    def forget(self) -> None:
        self._mark = {}

    def is_settled(self) -> bool:
        """Return whether all groups train together since an earlier call. Call this repeatedly."""
        simulation = self._simulation
        together = simulation.together()
        seen = simulation.world.counts["discards"], simulation.checkers.newest_id
        if not together or seen != self._seen or self._mark.keys() != set(together):
            self._mark = {rank: rank.commits for rank in together}
            self._seen = seen
            return False
        return all(rank.commits >= self._mark[rank] + STEPS_TOGETHER for rank in together)
