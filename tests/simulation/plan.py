"""What a seed means: the configuration of a run, its groups, and its mix of faults. All drawn, nothing fixed."""

import random
from dataclasses import dataclass

from lighthouse.quorum_config import QuorumConfig
from lighthouse.selection import size_for

NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Plan:
    """`settle_s`: how long after the last fault it may take until all train together again."""

    seed: int
    scenario: str
    config: QuorumConfig
    groups: int
    group_world_size: int
    faults_s: float
    fault_every_s: float
    mix: tuple[str, ...]
    delay_s: float = 0.002
    step_s: float = 0.2
    step_spread: float = 0.3
    heal_s: float = 0.3
    heal_timeout_s: float = 5.0
    collective_timeout_s: float = 5.0
    quorum_timeout_s: float = 20.0
    vote_timeout_s: float = 5.0
    restart_s: float = 1.0
    checkpoint_every: int = 10
    from_checkpoint: float = 0.5
    init_sync: bool = True
    wants_next: float = 1.0
    breaks: float = 0.0
    torchft: int = 0

    @property
    def settle_s(self) -> float:
        config = self.config
        waits = (
            2 * config.join_timeout_s
            + 4 * config.heartbeat_timeout_s
            + 3 * config.lease_s
            + 2 * self.quorum_timeout_s
            + 4 * (self.collective_timeout_s + self.heal_timeout_s + self.vote_timeout_s)
        )
        return 30 + 2 * waits + 60 * self.step_s


def draw_plan(seed: int, *, seconds: float = 75.0, scenario: str | None = None) -> Plan:
    r = random.Random(f"plan {seed}")
    scenario = scenario or "storm"
    groups = r.choice((2, 3, 3, 4, 5))
    config = _draw_config(r, groups)
    step_s = r.choice((0.05, 0.1, 0.2, 0.5))
    if r.random() < 0.15:
        step_s = 1.2 * config.join_timeout_s
    timeout_s = r.choice((2.0, 4.0, 8.0)) + 2 * step_s
    torchft = r.choice((1, groups)) if r.random() < 0.1 else 0
    return Plan(
        seed=seed,
        scenario=scenario,
        config=config,
        groups=groups,
        group_world_size=1 if torchft else r.choice((1, 1, 2, 3)),
        faults_s=0.6 * seconds,
        fault_every_s=r.choice((1.0, 2.0, 4.0, 8.0)),
        mix=_draw_mix(r),
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


def _draw_config(r: random.Random, groups: int) -> QuorumConfig:
    heartbeat_timeout_s = r.choice((1.5, 2.0, 5.0))
    active = max(1, groups - 1) if r.random() < 0.12 else None
    sizes = frozenset(r.choice(((1, 2), (2, 4), (1, 3), (2, 3)))) if r.random() < 0.12 else frozenset[int]()
    return QuorumConfig(
        min_replicas=min(size_for(groups, sizes, active), r.choice((1, 1, 1, 2, max(1, groups - 1)))),
        join_timeout_s=r.choice((1.5, 4.0, 15.0)),
        heartbeat_timeout_s=heartbeat_timeout_s,
        lease_s=r.choice((heartbeat_timeout_s, 1.5, 3.0)),
        stands=r.random() < 0.92,
        active=active,
        allowed_sizes=sizes,
    )


FAULTS = (
    "kill_group",
    "kill_rank",
    "kill_manager",
    "vanish_group",
    "kill_lighthouse",
    "crash_telling",
    "pause_group",
    "pause_rank",
    "pause_lighthouse",
    "cut_lighthouse",
    "cut_one_way",
    "cut_peers",
    "break_session",
    "pause_manager",
    "break_watch",
    "slow_group",
    "shrink_only",
    "fail_step",
    "cancel_call",
    "cancel_vote",
    "drain",
    "twin",
    "lose_journal",
    "change_lease",
)


def _draw_mix(r: random.Random) -> tuple[str, ...]:
    return tuple(r.sample([fault for fault in FAULTS if fault != "shrink_only"], r.randint(2, 6)))
