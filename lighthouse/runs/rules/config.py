"""What a run's machine is set up with."""

from dataclasses import dataclass, field

from lighthouse_protocol.rules.stall import Limits


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`wall_offset_s` makes the wall clock of the machine's monotonic one, for the moments that people read.

    `beat_interval_s`: how often a supervisor is to beat. `run`: its name; `limits`: how long its ranks may be without a
    mark.
    """

    rank_timeout_s: float = 30.0
    wall_offset_s: float = 0.0
    beat_interval_s: float = 1.0
    run: str = ""
    limits: Limits = field(default_factory=Limits)
