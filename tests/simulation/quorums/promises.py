"""S6 to S9 and S13 of docs/contributing/protocol.md, which concern a whole run: one class for each scenario."""

from typing import TYPE_CHECKING

from lighthouse.job.presence import ABSENT_KEPT
from tests.simulation.checks import memory_of
from tests.simulation.faults import Fault
from tests.simulation.quorums.collectives import LATE_S
from tests.simulation.quorums.faults import KINDS
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.rank import Rank
    from tests.simulation.quorums.simulation import QuorumSimulation

# A quorum that has lost a participant by one of these is followed by another one.
CHANGES = ("kill_group", "kill_rank", "kill_manager", "vanish_group", "drain")
AWAY_SHORTLY = ("restart_lighthouse", "close_shortly")
NOTICED_AT_ONCE = ("kill_group", "kill_rank", "kill_manager", "break_session")
STEPS_AFTER_LOSS = 2
LOOKS_AFTER_RESTART_S = 4.0
NOTICED_WITHIN_S = 3.0
# A lighthouse forgets who has gone after max(60 s, 12 heartbeat timeouts) of a clock that may be slow.
FORGETS_AFTER_S = 75.0


class Promise:
    """Checks of any run: quorums form."""

    def __init__(self, simulation: "QuorumSimulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.plan = simulation.plan
        self.hit: set[int] = set()

    def fired(self, fault: Fault, group: "Group | None") -> None:
        """Note a fault just before it strikes."""
        newest = self.simulation.checkers.newest_id
        is_member = newest and group is not None and all(rank.quorum_id == newest for rank in group.ranks)
        if is_member and fault.what in CHANGES:
            self.hit.add(newest)

    def discarded(self, rank: "Rank", quorum_id: int, step: int) -> None:
        pass

    def at_end(self) -> None:
        formed = self.world.counts["quorums"]
        if formed < 1 + len(self.hit):
            raise Violation(f"too few quorums: {formed}, and {len(self.hit)} lost a participant")

    @property
    def round_s(self) -> float:
        """The longest time of a step, with its messages."""
        return (1 + self.plan.step_spread) * self.plan.step_s + 0.1 + 60 * self.plan.delay_s + 2 * LATE_S


class Graceful(Promise):
    """S6: groups only join and drain, so no step is discarded."""

    def discarded(self, rank: "Rank", quorum_id: int, step: int) -> None:
        raise Violation(f"S6 {rank.name} discards step {step} of quorum {quorum_id}; all came and left in good order")


class Misfits(Graceful):
    """S13: misfits call while groups come and go in good order. They cause no discard and no quorum."""

    def fired(self, fault: Fault, group: "Group | None") -> None:
        super().fired(fault, group)
        if KINDS[fault.what].place == "misfits":
            self.simulation.begin()
            self.world.after(NOTICED_WITHIN_S, self._look, fault, self.simulation.checkers.newest_id)

    def discarded(self, rank: "Rank", quorum_id: int, step: int) -> None:
        raise Violation(f"S13 {rank.name} discards step {step} of quorum {quorum_id}, for what a misfit says")

    def _look(self, fault: Fault, quorum_id: int) -> None:
        self.simulation.end()
        if self.simulation.checkers.newest_id != quorum_id:
            raise Violation(f"S13 quorum {quorum_id} becomes {self.simulation.checkers.newest_id} by {fault}")


class Losses(Promise):
    """S7: one group is lost at a time. The others lose one step, and continue once the loss is detected."""

    def fired(self, fault: Fault, group: "Group | None") -> None:
        super().fired(fault, group)
        others = [rank for other in self.simulation.groups if other is not group for rank in other.ranks]
        before = [(rank, rank.commits, rank.discards) for rank in others]
        self.simulation.begin()
        self.world.after(self._limit_s(fault), self._look, fault, before)

    def _limit_s(self, fault: Fault) -> float:
        """Return the time to detect a loss, form a quorum, repeat the step, and heal the group if it returns."""
        config = self.plan.config
        notice_s = 0.3 if fault.what in NOTICED_AT_ONCE else 1.3 * config.heartbeat_timeout_s + 1.0
        return notice_s + (STEPS_AFTER_LOSS + 2) * self.round_s + 2 * self.plan.heal_s

    def _look(self, fault: Fault, before: "list[tuple[Rank, int, int]]") -> None:
        self.simulation.end()
        for rank, commits, discards in before:
            if rank.discards > discards + 1:
                raise Violation(f"S7 {rank.name} discards {rank.discards - discards} steps after {fault}")
            if rank.commits < commits + STEPS_AFTER_LOSS:
                raise Violation(
                    f"S7 {rank.name} made {rank.commits - commits} steps in {self._limit_s(fault):.1f} s after {fault}"
                )


class Restarts(Promise):
    """S9: the lighthouse is killed, paused or cut off, and nothing else happens. No step is lost."""

    def __init__(self, simulation: "QuorumSimulation") -> None:
        super().__init__(simulation)
        self._quorum_id = 0

    def fired(self, fault: Fault, group: "Group | None") -> None:
        super().fired(fault, group)
        self._quorum_id = self._quorum_id or self.simulation.checkers.newest_id
        if fault.what in AWAY_SHORTLY:
            self.simulation.checkers.longest_gap_s.clear()
            self.simulation.begin()
            self.world.after(LOOKS_AFTER_RESTART_S, self._look, fault)

    def _look(self, fault: Fault) -> None:
        self.simulation.end()
        for name, gap_s in self.simulation.checkers.longest_gap_s.items():
            if gap_s > self.round_s:
                raise Violation(f"S9 {name} waited {gap_s:.2f} s for a step of {self.plan.step_s} s after {fault}")

    def discarded(self, rank: "Rank", quorum_id: int, step: int) -> None:
        if self._quorum_id:
            raise Violation(f"S9 {rank.name} discards step {step} of quorum {quorum_id}; only the lighthouse was away")

    def at_end(self) -> None:
        super().at_end()
        newest = self.simulation.checkers.newest_id
        if self._quorum_id not in (0, newest):
            raise Violation(f"S9 quorum {self._quorum_id} became {newest}; only the lighthouse was away")


class Churn(Promise):
    """S8: groups join once and leave. The lighthouse forgets them."""

    def at_end(self) -> None:
        super().at_end()
        process = self.simulation.lighthouse.process
        assert process is not None
        job_end = process.machine.job_end
        if len(job_end.absent) > ABSENT_KEPT:
            raise Violation(f"S8 the lighthouse remembers {len(job_end.absent)} groups for the end of the job")
        absent, job_end.absent = job_end.absent, ()
        memory = memory_of(process.machine)
        job_end.absent = absent
        long_ago = self.world.now - FORGETS_AFTER_S
        gone = [group for group in self.simulation.strangers if (group.ended_at or self.world.now) < long_ago]
        kept = [group.name for group in gone if group.replica_id.encode() in memory]
        self.world.counts["strangers forgotten"] += len(gone) - len(kept)
        if len(kept) > len(self.simulation.groups) - len(self.simulation.strangers):
            raise Violation(f"S8 the lighthouse remembers {len(kept)} groups that have gone, such as {kept[0]}")


PROMISES: dict[str, type[Promise]] = {
    "storm": Promise,
    "graceful": Graceful,
    "losses": Losses,
    "restarts": Restarts,
    "churn": Churn,
    "misfits": Misfits,
    "two_lighthouses": Promise,
    "tight": Promise,
}
