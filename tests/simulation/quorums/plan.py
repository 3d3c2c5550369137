"""What a seed means: the configuration of a run, its groups, and its mix of faults.

Most runs are a storm: any faults, at any time. Each other scenario checks one promise about whole runs (promises.py)
under the faults that the promise covers, one at a time.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from lighthouse.job.records import QuorumConfig
from tests.simulation.quorums.faults import KINDS, draw_mix
from tests.simulation.quorums.faults.lighthouse import LEASES_S, SIZES
from tests.simulation.quorums.faults.misfits import NEED_NO_ROOM, NEED_ROOM
from tests.simulation.simulation import Plan

# The rest of a run is for settling.
FAULTS_SHARE = 0.8
MAX_LEASE_S = max(LEASES_S)
# torchft's members do not say which state they hold: two lighthouses leave them with two that look alike.
NEED_NATIVES = ("second_lighthouse", "restart_manager", "answer_goes_back")
NEED_RANKS = ("lie",)  # several in a group
CHANGES_SIZES_SHARE = 0.1
NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumPlan(Plan):
    config: QuorumConfig
    groups: int
    group_world_size: int
    step_spread: float = 0.3
    heal_s: float = 0.3
    heal_timeout_s: float = 5.0
    collective_timeout_s: float = 5.0
    quorum_timeout_s: float = 20.0
    vote_timeout_s: float = 5.0
    checkpoint_every: int = 10
    from_checkpoint: float = 0.5
    init_sync: bool = True
    wants_next: float = 1.0
    breaks: float = 0.0
    closes: float = 0.0
    """The share of joins during which the session closes."""
    skips: float = 0.0
    """The share of commits that a rank does not apply."""
    pause: float = 0.0
    """The share of a step between a decision and the next request."""
    torchft: int = 0
    """The number of groups with torchft's manager."""
    one_at_a_time: bool = False
    """A fault waits until all groups train together again."""
    catch_up: float = 0.0
    """The share of groups that heal while the others train."""
    has_two_lighthouses: bool = False
    is_tight: bool = False
    """Faults come a few at a time, and last until about a deadline. They also strike groups that are leaving."""

    @property
    def quiet_s(self) -> float:
        """The time within which all processes notice the end of a fault."""
        return 2.0 + 2 * self.config.heartbeat_timeout_s

    @property
    def refusals(self) -> int:
        """Refusals in a row that end a rank. They come a second apart, and a peer's step may take as long."""
        return 30 + int(self.step_s + self.collective_timeout_s + self.heal_timeout_s)

    @property
    def settle_s(self) -> float:
        """The longest time to settle after the last fault: twice the cost of the loss that is detected last, with its
        silence, leases, a straggler, a step that times out, a start, and some steps."""
        config = self.config
        noticed_s = 2 * config.heartbeat_timeout_s + max(config.lease_s, MAX_LEASE_S) + config.join_timeout_s
        step_s = self.collective_timeout_s + self.heal_timeout_s + self.vote_timeout_s
        return 2 * (10 + noticed_s + step_s + 2 * self.restart_s + 15 * self.step_s)


def draw_plan(
    seed: int, *, seconds: float = 75.0, scenario: str | None = None, groups: int | None = None, min_step_s: float = 0.0
) -> QuorumPlan:
    """Draw the plan of a seed, with `groups` and `scenario` instead of drawn ones if they are given."""
    r = random.Random(f"plan {seed}")
    scenario = scenario or r.choices(tuple(SCENARIOS), SCENARIO_WEIGHTS)[0]
    groups = groups or r.choice((2, 3, 3, 4, 5, 6))
    plan = SCENARIOS[scenario](_draw_storm(r, seed, seconds, groups, min_step_s), r)
    is_storm = scenario in ("storm", "tight")
    skips = random.Random(f"skips {seed}").choice((0.0, 0.0, 0.02)) if is_storm else 0.0
    closes = random.Random(f"closes {seed}").choice((*[0.0] * 5, 0.2)) if is_storm else 0.0
    pause = random.Random(f"pause {seed}").choice((0.0, 0.05, 0.3))
    catch_up = random.Random(f"catch up {seed}").choice((0.0, 0.0, 0.5, 1.0))
    changes_sizes = scenario == "storm" and random.Random(f"sizes {seed}").random() < CHANGES_SIZES_SHARE
    mix = (*plan.mix, "change_sizes") if changes_sizes else plan.mix
    return replace(plan, mix=mix, catch_up=catch_up, closes=closes, skips=skips, pause=pause)


def _draw_storm(r: random.Random, seed: int, seconds: float, groups: int, min_step_s: float) -> QuorumPlan:
    config = _draw_config(r, groups)
    step_s = r.choice([s for s in (0.05, 0.1, 0.2, 0.25, 0.5, 1.0) if s >= min_step_s])
    if r.random() < 0.15:
        step_s = max(min_step_s, 1.2 * config.join_timeout_s)
    timeout_s = r.choice((2.0, 4.0, 8.0)) + 2 * step_s
    torchft = r.choice((1, groups)) if r.random() < 0.1 else 0
    width = 1 if torchft else r.choice((1, 1, 2, 3))
    return QuorumPlan(
        seed=seed,
        scenario="storm",
        config=config,
        groups=groups,
        group_world_size=width,
        faults_s=FAULTS_SHARE * seconds,
        fault_every_s=r.choice((1.0, 1.0, 2.0, 4.0)),
        mix=_leave_out(draw_mix(r, 6), NEED_NATIVES * bool(torchft) + NEED_RANKS * (width == 1)),
        delay_s=r.choice((0.0005, 0.002, 0.01, 0.03)),
        step_s=step_s,
        heal_s=r.choice((0.05, 0.3, 1.5)),
        collective_timeout_s=timeout_s,
        heal_timeout_s=timeout_s,
        vote_timeout_s=timeout_s,
        quorum_timeout_s=3 * step_s + r.choice((5.0, 20.0, 60.0)),
        restart_s=r.choice((0.05, 0.3, 1.0, 4.0)),
        checkpoint_every=r.choice((1, 5, 20)),
        from_checkpoint=r.choice((0.0, 0.5, 0.9)),
        init_sync=r.random() < 0.7,
        wants_next=r.choice((0.0, 1.0, 1.0, 0.7)),
        breaks=r.choice((0.0, 0.0, 0.1, 0.3)),
        torchft=torchft,
    )


def _leave_out(mix: tuple[str, ...], what: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in mix if name not in what) or ("kill_group",)


def _draw_config(r: random.Random, groups: int) -> QuorumConfig:
    heartbeat_timeout_s = r.choice((1.5, 2.0, 5.0))
    active = max(1, groups - 1) if r.random() < 0.12 else None
    sizes = frozenset(r.choice(SIZES)) if r.random() < 0.12 else frozenset[int]()
    most = max((size for size in sizes or range(groups + 1) if size <= (active or groups)), default=0)
    if not most:
        active, most = None, max(size for size in sizes if size <= groups)
    return QuorumConfig(
        min_replicas=min(most, r.choice((1, 1, 1, 2, max(1, groups - 1)))),
        join_timeout_s=r.choice((1.5, 4.0, 15.0)),
        heartbeat_timeout_s=heartbeat_timeout_s,
        lease_s=r.choice((heartbeat_timeout_s, 1.5, 3.0)),
        stands=r.random() < 0.92,
        active=active,
        allowed_sizes=sizes,
        last_call_s=r.choice((0.0, 2.0)) if active is not None else 0.0,
    )


def _one_at_a_time(plan: QuorumPlan, mix: tuple[str, ...], **changes: Any) -> QuorumPlan:
    """Return a plan of native groups and standing quorums on a good network, with time between two faults."""
    step_s = min(plan.step_s, MAX_STEP_S)
    timeout_s = 8.0 + 2 * step_s
    config = replace(plan.config, stands=True, min_replicas=1, active=None, allowed_sizes=frozenset())
    calm = replace(
        plan,
        config=replace(config, lease_s=config.heartbeat_timeout_s),
        mix=mix,
        one_at_a_time=True,
        fault_every_s=plan.faults_s / FAULTS_IN_TURN,
        torchft=0,
        breaks=0.0,
        step_s=step_s,
        delay_s=min(plan.delay_s, MAX_DELAY_S),
        heal_s=min(plan.heal_s, MAX_HEAL_S),
        collective_timeout_s=timeout_s,
        heal_timeout_s=timeout_s,
        vote_timeout_s=timeout_s,
        quorum_timeout_s=60.0,
    )
    return replace(calm, **changes)


def _storm(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    return plan


def _graceful(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    return _one_at_a_time(plan, ("drain", "stranger_drains"), scenario="graceful")


def _losses(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    mix = tuple(r.sample(LOSSES, 3))
    return _one_at_a_time(plan, mix, scenario="losses")


def _restarts(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    calm = _one_at_a_time(plan, ("restart_lighthouse", "pause_lighthouse", "close_shortly"), scenario="restarts")
    return replace(calm, config=replace(calm.config, heartbeat_timeout_s=5.0, lease_s=5.0))


def _misfits(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    """Return a plan in which groups drain while misfits call. `max_replicas` may leave no room for a misfit."""
    is_full = r.random() < 0.2
    left_out = NEED_ROOM if is_full else NEED_NO_ROOM
    misfits = (kind.name for kind in KINDS.values() if kind.place == "misfits" and kind.name not in left_out)
    calm = _one_at_a_time(plan, ("drain", *misfits), scenario="misfits", fault_every_s=plan.faults_s / MISFITS_IN_TURN)
    max_replicas = plan.groups if is_full else calm.config.max_replicas
    return replace(calm, config=replace(calm.config, heartbeat_timeout_s=2.0, lease_s=2.0, max_replicas=max_replicas))


def _churn(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    """Return a plan that is long enough for the lighthouse to forget groups that have left."""
    calm = _one_at_a_time(
        plan, ("stranger", "stranger_ahead", "stranger_drains"), scenario="churn", fault_every_s=1.0, faults_s=120.0
    )
    return replace(calm, groups=min(3, calm.groups), group_world_size=1, step_s=0.5, one_at_a_time=False)


def _two_lighthouses(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    """Return a plan with two lighthouses on one store, and faults of both and of groups."""
    mix = (*r.sample(AROUND_A_STORE, 4), *r.sample(LOSSES, 2), r.choice(("drain", "stranger")))
    lease_s = r.choice((3.0, 5.0, 8.0))
    config = replace(plan.config, stands=True, lease_s=lease_s, heartbeat_timeout_s=min(lease_s, 5.0))
    changes = {"scenario": "two_lighthouses", "config": config, "mix": mix, "has_two_lighthouses": True, "torchft": 0}
    return replace(plan, **changes)


def _tight(plan: QuorumPlan, r: random.Random) -> QuorumPlan:
    """Return a plan with few groups and short timeouts, whose faults overlap and end around deadlines."""
    groups = r.choice((1, 2, 2, 3, 3, 4))
    config = replace(
        plan.config,
        min_replicas=min(groups, r.choice((1, 1, 1, 2))),
        join_timeout_s=r.choice((0.6, 1.5, 4.0)),
        heartbeat_timeout_s=r.choice((0.8, 1.5, 3.0)),
        lease_s=r.choice((0.5, 1.0, 1.5, 3.0)),
        stands=True,
        active=1 if r.random() < 0.2 else None,
        allowed_sizes=frozenset(),
        last_call_s=0.0,
    )
    config = replace(config, min_replicas=1) if config.active else config
    deadline_s = config.lease_s + config.heartbeat_timeout_s
    width = plan.group_world_size
    drawn = [kind.name for kind in KINDS.values() if kind.weight]
    return replace(
        plan,
        scenario="tight",
        config=config,
        groups=groups,
        torchft=0,
        mix=_leave_out(tuple(r.sample((*drawn, *TIGHT), r.randint(3, 6))), NEED_RANKS * (width == 1)),
        is_tight=True,
        delay_s=min(plan.delay_s, config.lease_s / 100),
        faults_s=TIGHT_FAULTS_S,
        fault_every_s=r.choice((1.0, 2.0, 4.0)),
        step_s=min(plan.step_s, 0.25),
        restart_s=r.choice((0.05, 0.5 * deadline_s, deadline_s, 2 * deadline_s)),
    )


TIGHT = ("restart_lighthouse", "close_shortly", "kill_group", "drain")
TIGHT_FAULTS_S = 25.0
FAULTS_IN_TURN, MISFITS_IN_TURN = 6, 10
MAX_STEP_S, MAX_DELAY_S, MAX_HEAL_S = 1.0, 0.01, 0.3
AROUND_A_STORE = (
    "kill_leader",
    "stop_leader",
    "cut_leader_from_store",
    "stop_store",
    "kill_both_lighthouses",
    "drift_store",
    "cut_leader_from_groups",
)
LOSSES = ("kill_group", "kill_rank", "kill_manager", "vanish_group", "pause_group", "break_session")
SCENARIOS = {
    "storm": _storm,
    "graceful": _graceful,
    "losses": _losses,
    "restarts": _restarts,
    "churn": _churn,
    "misfits": _misfits,
    "two_lighthouses": _two_lighthouses,
    "tight": _tight,
}
SCENARIO_WEIGHTS = (70, 6, 12, 6, 2, 16, 0, 0)
