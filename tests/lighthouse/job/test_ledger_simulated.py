"""The ledger against the simulator's truth: its groups, the moments of their kills, and their managers' own counters.

Every process has a clock of its own rate. Moments of the world are scaled by the rate of the lighthouse's clock. The
counters of managers are in seconds of their own clocks, and the ledger adds them as they are.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lighthouse.job.costs import add_up
from lighthouse.job.ledger import Cause
from lighthouse_protocol.messages.membership import Quorum
from tests.simulation.quorums.group import Group
from tests.simulation.quorums.lighthouse import QuorumLighthouse
from tests.simulation.quorums.manager import ManagerProcess
from tests.simulation.quorums.plan import draw_plan
from tests.simulation.quorums.simulation import QuorumSimulation

AWAY = (Cause.DOWN, Cause.RESTART, Cause.IDLE)


class Recorded(QuorumSimulation):
    """Notes what happens to groups, in the world's time. Ends while all groups train."""

    def __init__(self, seed: int) -> None:
        drawn = draw_plan(seed, scenario="losses", seconds=120.0)
        config = replace(drawn.config, active=None, allowed_sizes=frozenset[int]())
        plan = replace(drawn, mix=("kill_group",), torchft=0, pause=0.0, catch_up=0.0, breaks=0.0, config=config)
        super().__init__(plan)
        self.first: dict[str, float] = {}  # when the lighthouse met a group
        self.away: dict[str, float] = {}  # groups that are in no quorum, and since when
        self.away_s: dict[str, float] = defaultdict(float)
        self.kills = 0
        self.managers: set[ManagerProcess] = set()
        formed = self.checkers.formed

        def form(quorum: Quorum, *, stands: bool) -> None:
            formed(quorum, stands=stands)
            for participant in quorum.participants:
                name = participant.replica_id
                group = next(each for each in self.groups if each.replica_id == name)
                if name in self.away and group.is_up and group.manager.machine.incarnation == participant.incarnation:
                    self.away_s[name] += self.world.now - self.away.pop(name)

        self.checkers.formed = form  # type: ignore[method-assign]

    @property
    def process(self) -> QuorumLighthouse:
        assert self.lighthouse.process is not None
        return self.lighthouse.process

    def add_group(self, replica_id: str, *, is_torchft: bool = False) -> Group:
        group = super().add_group(replica_id, is_torchft=is_torchft)
        start, kill = group.start, group.kill

        def began() -> None:
            start()
            assert isinstance(group.manager, ManagerProcess)
            self.managers.add(group.manager)

        def killed() -> None:
            self.kills += 1
            self.away.setdefault(replica_id, self.world.now)
            kill()

        group.start, group.kill = began, killed  # type: ignore[method-assign]
        return group

    def met(self, replica_id: str) -> None:
        self.first.setdefault(replica_id, self.world.now)
        if replica_id not in self.away_s:
            self.away.setdefault(replica_id, self.world.now)

    def counted(self, name: str) -> float:
        return sum(getattr(manager.machine.counts.totals, name) for manager in self.managers)

    def _end_job(self) -> None:
        """Leave all groups training."""


def watch_sessions(simulation: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Callable[..., None] = QuorumLighthouse._handle

    def handled(process: QuorumLighthouse, end: Any, message: Any) -> None:
        handle(process, end, message)
        for name in process.machine.job.groups:
            simulation.met(name)

    monkeypatch.setattr(QuorumLighthouse, "_handle", handled)


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_agrees_with_the_truth(seed, monkeypatch):
    simulation = Recorded(seed)
    watch_sessions(simulation, monkeypatch)
    simulation.run()
    process, world = simulation.process, simulation.world
    assert simulation.kills
    assert simulation.lighthouse.starts == 1
    lines = process.jobs.incidents.ledger.take_lines(process.clock(), simulation.lighthouse.wall())
    report, spent = add_up(lines), add_up(lines).seconds

    wall_s = {name: (world.now - at) * process.rate for name, at in simulation.first.items()}
    assert {name: sum(each.values()) for name, each in report.by_group.items()} == pytest.approx(wall_s, rel=0.001)
    assert report.group_s == pytest.approx(sum(wall_s.values()), rel=0.001)
    assert sum(sum(each.values()) for each in report.by_host.values()) == pytest.approx(report.group_s)

    away_s = {name: sum(report.by_group[name][cause] for cause in AWAY) for name in wall_s}
    truth_s = {name: simulation.away_s[name] * process.rate for name in wall_s}
    noticed_s = 0.06 * simulation.kills  # a closed connection is noticed within 50 ms
    assert away_s == pytest.approx(truth_s, abs=noticed_s)
    if spent[Cause.WAIT] > 1:  # else managers with fast clocks count more time than there is
        unreported_s = (
            (process.machine.presence.beat_interval_s + simulation.plan.step_s) * len(simulation.managers) * 1.2
        )
        assert spent[Cause.COMPUTE] == pytest.approx(simulation.counted("step_s"), abs=unreported_s)
        assert spent[Cause.REPEATED] == pytest.approx(simulation.counted("discarded_s"), abs=unreported_s)
