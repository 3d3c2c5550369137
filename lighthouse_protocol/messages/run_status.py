"""What the lighthouse says of a run, for people and programs. Moments are wall-clock seconds. No protobuf."""

from dataclasses import dataclass, field
from enum import StrEnum

from lighthouse_protocol.constraints import Count, Offset
from lighthouse_protocol.messages.run import RunCounters, RunStopped, RunTerms
from lighthouse_protocol.messages.supervisor import SupervisorHeartbeat


class RankState(StrEnum):
    ACTIVE = "active"
    READY = "ready"  # waits for the next generation
    SPARE = "spare"  # of the present one
    STARTING = "starting"  # is here, and not ready
    FINISHED = "finished"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`state`: a RankState, or one that only a newer lighthouse knows. `rank`: in the last generation; None: none.
    `start`: another one for each incarnation (rules/proof.py)."""

    slot: int
    start: str
    state: str
    rank: int | None
    generation: Count | None
    step: Count
    phase: str
    beat_age_s: Offset
    attempt: int
    host: str
    pid: Count


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    name: str
    host: str
    slots: tuple[int, ...]
    is_connected: bool
    last: SupervisorHeartbeat = field(default_factory=SupervisorHeartbeat)


@dataclass(frozen=True, slots=True)
class ExcludedHost:
    """`supervisor`: the only one that it is excluded for; empty: for all."""

    host: str
    reason: str
    at: Offset
    supervisor: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`verdict`: why the next generation forms, or does not. `slots[i]` is rank i of the last one. `budget_used`:
    of the restart budget that is used up the most, be it a supervisor's or that of wrapped functions: 0 none, 1 all."""

    job: str
    run: str
    verdict: str
    counters: RunCounters
    terms: RunTerms
    slots: tuple[int, ...]
    is_complete: bool
    stop: RunStopped | None
    ranks: tuple[RankStatus, ...]
    supervisors: tuple[SupervisorStatus, ...]
    excluded: tuple[ExcludedHost, ...]
    budget_used: Offset = 0.0
