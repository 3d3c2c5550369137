"""How long a rank waits for what, and what it can be doing. Pure: no I/O, no clock."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class RankConfig:
    beat_interval_s: float = 1.0
    report_interval_s: float = 0.1
    """Steps are told at most so often."""
    accept_timeout_s: float = 10.0
    lighthouse_timeout_s: float = 600.0
    """A rank that runs nothing and does not reach the lighthouse for that long ends with an error."""
    duplicate_timeout_s: float = 45.0
    """How long a rank that finds its slot taken tries: a predecessor may be dead and not missed yet."""
    interrupt_interval_s: float = 0.5
    hard_timeout_s: float = 90.0
    """What is interrupted and still runs is killed after that."""
    soft_timeout_s: float | None = None
    """A function that has made a step and makes no other for so long has failed."""


class RankPhase(StrEnum):
    """`idle`: it runs nothing, and is not ready."""

    IDLE = "idle"
    READY = "ready"
    SPARE = "spare"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"
