"""python -m tests.mutants.short_runs MUTANT FROM:TO: the first of these runs that fails, with the code as it is.

A run is drawn from its number and from what aims.toml says of the mutant: a storm of the faults that bring it out, and,
where scenarios are named, in every second run one of these. They are shorter than the simulator's own runs, with steps
of 0.25 s and more, since most of a run's work is steps.
"""

import argparse
import logging
import random
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.__main__ import guarded
from tests.simulation.plan import NEED_RANKS, Plan, draw_plan
from tests.simulation.simulation import Result, run_plan

AIMS = Path(__file__).with_name("aims.toml")
SECONDS, MIN_STEP_S, MAX_STEP_S = 30.0, 0.25, 1.0
EVERY_S = (0.5, 1.0, 2.0)
MOST_FAULTS = 3
OF_SCENARIOS = ("groups", "group_world_size", "pause", "wants_next")


@dataclass(frozen=True, slots=True)
class Aim:
    """What brings `mutants` out: `faults`, `scenarios`, and what is fixed of the plan and the configuration."""

    mutants: Sequence[str]
    faults: Sequence[str]
    scenarios: Sequence[str] = ()
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def draw(self, number: int) -> Plan:
        is_aimed = number % 2 == 0 or not self.scenarios
        scenario = "storm" if is_aimed else self.scenarios[number // 2 % len(self.scenarios)]
        groups = self.plan.get("groups") if is_aimed else None
        plan = draw_plan(number, seconds=SECONDS, scenario=scenario, groups=groups, min_step_s=MIN_STEP_S)
        if is_aimed:
            return self._aim(plan, random.Random(f"own {number}"))
        return replace(plan, **{name: value for name, value in self.plan.items() if name in OF_SCENARIOS})

    def _aim(self, plan: Plan, r: random.Random) -> Plan:
        faults = self.faults if len(self.faults) <= MOST_FAULTS else r.sample(self.faults, MOST_FAULTS)
        is_wide = self.plan.get("group_world_size", plan.group_world_size) > 1
        mix = tuple(name for name in faults if is_wide or name not in NEED_RANKS) or ("kill_group",)
        config: dict[str, Any] = {"stands": True, **self.config}
        if "allowed_sizes" in config:
            config |= {"allowed_sizes": frozenset(config["allowed_sizes"])}
        every_s, step_s = r.choice(EVERY_S), min(plan.step_s, MAX_STEP_S)
        drawn: dict[str, Any] = {"mix": mix, "torchft": 0, "fault_every_s": every_s, "step_s": step_s, **self.plan}
        return replace(plan, **drawn, config=replace(plan.config, **config))


@dataclass(frozen=True, slots=True)
class OutOfReach:
    """Mutants that no run can find, and why."""

    mutants: Sequence[str]
    why: str


def load_aims() -> tuple[list[Aim], list[OutOfReach]]:
    document = tomllib.loads(AIMS.read_text())
    return [Aim(**row) for row in document["aim"]], [OutOfReach(**row) for row in document["out_of_reach"]]


def find_aim(mutant: str) -> Aim | None:
    """None: no run can find it."""
    return next((aim for aim in load_aims()[0] if mutant in aim.mutants), None)


def run(aim: Aim, number: int) -> Result:
    return run_plan(aim.draw(number))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.short_runs", description=__doc__)
    parser.add_argument("mutant", help="its name")
    parser.add_argument("numbers", help="FROM:TO")
    options = parser.parse_args(arguments)
    logging.disable()
    aim = find_aim(options.mutant)
    if aim is None:
        parser.error(f"{AIMS.name} has no aim for {options.mutant}")
    first, last = map(int, options.numbers.split(":"))
    for number in range(first, last):
        if violation := guarded(partial(run, aim), number).violation:
            print(f"run {number}: {violation[:300]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
