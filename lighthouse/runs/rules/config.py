"""What a run's machine is set up with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`wall_offset_s` makes the wall clock of the machine's monotonic one, for the moments that people read.

    `beat_interval_s`: how often a supervisor is to beat.
    """

    rank_timeout_s: float = 30.0
    wall_offset_s: float = 0.0
    beat_interval_s: float = 1.0
