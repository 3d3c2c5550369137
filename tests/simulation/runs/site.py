"""Where the lighthouse of a run is: its journal, and what else outlives a process of it."""

from typing import TYPE_CHECKING

from lighthouse.job.records import Row
from tests.simulation.runs.lighthouse import RunLighthouse

if TYPE_CHECKING:
    from tests.simulation.runs.simulation import RunSimulation


class LighthouseSite:
    def __init__(self, simulation: "RunSimulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.record: bytes | None = None
        self.rows: dict[tuple[int, str, str], Row] = {}
        self.process: RunLighthouse | None = None
        self.up_since = 0.0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_up

    def start(self) -> None:
        if not self.is_up:
            self.process = RunLighthouse(self)
            self.up_since = self.world.now

    def kill(self, back_after_s: float) -> None:
        if self.process is not None:
            self.process.kill()
        self.world.after(back_after_s, self.start)

    def lose_journal(self) -> None:
        """While it is down."""
        self.record = None
        self.rows.clear()
        self.simulation.checkers.journal_lost()
