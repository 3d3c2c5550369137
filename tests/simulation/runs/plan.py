"""What a seed means: the terms of a run, its hosts, its timeouts and its mix of faults."""

import random
from dataclasses import dataclass, replace

from lighthouse_protocol.messages.run import RunTerms
from tests.simulation.simulation import Plan

STRIDE = 100
TIGHT_FAULTS_S = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Plan):
    terms: RunTerms
    hosts: int
    ranks_per_host: int
    steps: int
    """The training ends after this many."""
    rank_timeout_s: float
    boot_s: float
    interrupt_s: float
    """The time that a function takes to stop."""
    relaunch_s: float
    is_group_scope: bool = False
    """A rank that dies takes the other ranks of its host with it."""
    budget: int = 10_000
    """The number of restarts that a supervisor has."""
    hard_timeout_s: float = 90.0
    accept_timeout_s: float = 10.0

    @property
    def settle_s(self) -> float:
        """The time within which a run ends without further faults."""
        terms = self.terms
        waits = 4 * terms.join_timeout_s + 2 * terms.return_timeout_s + 4 * self.rank_timeout_s
        return 90 + waits + 10 * (self.restart_s + self.boot_s + self.interrupt_s) + 3 * self.steps * self.step_s


def draw_plan(seed: int, scenario: str | None = None) -> RunPlan:
    r = random.Random(f"run {seed}")
    scenario = scenario or r.choices(tuple(SCENARIOS), (6, 2, 3, 0))[0]
    hosts, per_host = r.choice(((1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2)))
    step_s = r.choice((0.1, 0.3, 1.0))
    faults_s = r.choice((30.0, 60.0))
    trains_s = r.choice((3.0, 10.0)) if scenario == "ends" else 1.5 * faults_s
    plan = RunPlan(
        seed=seed,
        scenario=scenario,
        terms=_draw_terms(r, hosts * per_host),
        hosts=hosts,
        ranks_per_host=per_host,
        mix=tuple(r.sample(FAULTS, r.randint(2, 6))) + SCENARIOS[scenario],
        faults_s=faults_s,
        fault_every_s=r.choice((0.7, 1.5, 4.0)),
        steps=int(trains_s / step_s),
        step_s=step_s,
        delay_s=r.choice((0.0005, 0.002, 0.01, 0.03)),
        rank_timeout_s=r.choice((2.0, 5.0)),
        boot_s=r.choice((0.05, 0.5, 2.0)),
        interrupt_s=r.choice((0.01, 0.1, 0.6)),
        restart_s=r.choice((0.05, 0.5, 2.0, 6.0)),
        relaunch_s=r.choice((0.3, 1.0, 5.0)),
        is_group_scope=r.random() < 0.4,
        budget=r.choice((10_000, 10_000, 10_000, 8)),
        hard_timeout_s=r.choice((2.0, 90.0)),
        accept_timeout_s=r.choice((3.0, 10.0)),
    )
    return _tight(plan, r) if scenario == "tight" else plan


def _tight(plan: RunPlan, r: random.Random) -> RunPlan:
    """Return a plan with short timeouts, whose faults overlap and end around deadlines."""
    terms = replace(plan.terms, join_timeout_s=r.choice((0.8, 2.0, 4.0)), return_timeout_s=r.choice((1.0, 3.0, 6.0)))
    return replace(
        plan,
        terms=terms,
        rank_timeout_s=r.choice((1.0, 2.0)),
        restart_s=r.choice((0.05, terms.join_timeout_s, terms.return_timeout_s)),
        accept_timeout_s=r.choice((1.0, 3.0)),
        faults_s=TIGHT_FAULTS_S,
        steps=int(1.5 * TIGHT_FAULTS_S / plan.step_s),
        mix=tuple(r.sample(FAULTS, r.randint(3, 6))) + (SCENARIOS["stops"] if r.random() < 0.2 else ()),
    )


def _draw_terms(r: random.Random, world_size: int) -> RunTerms:
    active = world_size - r.choice((0, 0, 1, 2))
    active = active if 1 <= active < world_size else None
    target = active or world_size
    divisible_by = 2 if target % 2 == 0 and r.random() < 0.2 else 1
    return RunTerms(
        world_size=world_size,
        active=active,
        min_active=r.choice((1, 1, max(1, target - 1), target)),
        divisible_by=divisible_by,
        hosts_together=r.random() < 0.15,
        stride=STRIDE,
        join_timeout_s=r.choice((3.0, 8.0, 20.0)),
        return_timeout_s=r.choice((5.0, 20.0, 60.0)),
        max_iterations=r.choice((None, None, None, None, 30)),
        max_restarts=r.choice((None, None, None, 8)),
        restart_delay_s=r.choice((None, None, 0.3)),
    )


FAULTS = (
    "kill_rank",
    "kill_rank",
    "kill_two",
    "raise_in_rank",
    "pause_rank",
    "hang_rank",
    "behind_rank",
    "break_rank",
    "kill_supervisor",
    "pause_supervisor",
    "break_supervisor",
    "twin_supervisor",
    "impostor_supervisor",
    "impostor_rank",
    "kill_lighthouse",
    "crash_telling",
    "pause_lighthouse",
    "lose_journal",
    "cut_host",
    "cut_one_way",
    "slow_lighthouse",
)
"""Faults after which a run goes on."""

SCENARIOS: dict[str, tuple[str, ...]] = {
    "storm": (),
    "stops": ("stop_run", "exit_130", "resume"),
    "ends": ("launch_again",),
    "tight": (),
}
"""What each draws besides. In `ends` the training is short, so that faults meet its end and what comes after."""
