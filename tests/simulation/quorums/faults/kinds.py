"""The table of all kinds of faults, which the modules of this folder fill, and how a storm draws from it."""

from typing import TYPE_CHECKING

from tests.simulation.faults import BURST_S, Fault, Kinds, draw_overlapping

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.quorums.plan import QuorumPlan
    from tests.simulation.quorums.simulation import QuorumSimulation

PATIENCE_S = 300.0
FIRST_FAULT_S = 3.0
# Some faults follow the last one within BURST_S.
BURST_SHARE = 0.15
FOCUSED_SHARE = 0.5
SHORT_S = (0.05, 0.3, 1.0, 2.5, 5.0)
FIXED_S = (0.007, 0.5, 2.0)  # connections that end together, the longest back-off, a keepalive

KINDS = Kinds()
fault = KINDS.fault


def draw_mix(r: "Random", most: int) -> tuple[str, ...]:
    """Draw two to `most` different kinds for a storm. Half of the storms strike two places only."""
    drawn = [kind for kind in KINDS.values() if kind.weight]
    places = sorted({kind.place for kind in drawn})
    struck = r.sample(places, 2) if r.random() < FOCUSED_SHARE else places
    left = {kind.name: kind.weight for kind in drawn if kind.place in struck}
    mix: list[str] = []
    for _ in range(min(len(left), r.randint(2, most))):
        name = r.choices(tuple(left), tuple(left.values()))[0]
        del left[name]
        mix.append(name)
    return tuple(mix)


def draw_faults(simulation: "QuorumSimulation") -> list[Fault]:
    plan, r = simulation.plan, simulation.world.random
    if plan.is_tight:
        return draw_overlapping(r, plan, plan.groups, deadlines_s(plan))
    faults: list[Fault] = []
    at = FIRST_FAULT_S + r.random()
    while at < plan.faults_s:
        faults.append(Fault(at, r.choice(plan.mix), r.randrange(plan.groups), _draw_duration(plan, r)))
        is_burst = not plan.one_at_a_time and r.random() < BURST_SHARE
        at += r.choice(BURST_S) * r.random() if is_burst else r.expovariate(1 / plan.fault_every_s)
    return faults


def deadlines_s(plan: "QuorumPlan") -> tuple[float, ...]:
    config = plan.config
    lease_s, silence_s = config.lease_s, config.heartbeat_timeout_s
    interval_s = min(1.0, lease_s / 4, silence_s / 4)
    return lease_s, 0.8 * lease_s, silence_s, config.join_timeout_s, interval_s, plan.step_s, *FIXED_S


def _draw_duration(plan: "QuorumPlan", r: "Random") -> float:
    """Draw any time, or about one of the configured timeouts."""
    if r.random() < 0.5:
        return r.choice(SHORT_S) * r.uniform(0.7, 1.3)
    config = plan.config
    about_s = r.choice((config.lease_s, 0.8 * config.lease_s, config.heartbeat_timeout_s, plan.step_s))
    return about_s * r.uniform(0.9, 1.2)
