"""Traces of the simulator. The only module here that knows it."""

import random
from dataclasses import replace

from tests.model.conformance import Sent
from tests.mutants.catalogue import load
from tests.simulation.simulators import SIMULATORS
from tests.simulation.world import World

MIX = (
    "kill_group", "kill_manager", "restart_lighthouse", "kill_lighthouse", "break_session", "pause_manager",
    "cut_lighthouse", "fail_step", "vanish_group", "close_shortly", "pause_group", "cut_peers", "pause_lighthouse",
    "reboot_group", "slow_group", "drift_group", "half_break", "pause_rank", "close_connections", "full_disk",
    "reboot_lighthouse", "change_lease", "drift_lighthouse", "jump_wall_clock", "tear_write",
)  # fmt: skip


def trace_of(seed: int) -> list[Sent]:
    """What a run sends, under faults that the model has: no torchft, no catching up, any number of groups."""
    simulator = SIMULATORS["quorums"]
    drawn = simulator.draw_plan(seed, seconds=15.0, scenario="storm")
    config = replace(drawn.config, stands=True, active=None, allowed_sizes=frozenset(), min_replicas=1, last_call_s=0.0)
    kinds = tuple(random.Random(f"model {seed}").sample(MIX, 3))
    plan = replace(drawn, mix=kinds, config=config, torchft=0, catch_up=0.0, skips=0.0, breaks=0.0, from_checkpoint=0.0)
    sent: list[Sent] = []
    World.on_send = lambda who, to, message: sent.append((who, to, message))
    try:
        result = simulator.run(plan)
    finally:
        World.on_send = None
    assert not result.violation, result.violation
    return sent


def planted_defects() -> set[str]:
    """Those of the simulator that break a promise about quorums."""
    return {mutant.name for mutant in load() if mutant.shown is not None and mutant.shown.rule.startswith("S")}
