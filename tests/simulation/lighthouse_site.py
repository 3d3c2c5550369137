"""Where the lighthouse runs: its journal, its settings, and what outlives a process of it."""

from dataclasses import dataclass, replace

from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.record import QuorumRecord
from tests.simulation.checkers import Checkers
from tests.simulation.lighthouse_process import LighthouseProcess
from tests.simulation.network import Network
from tests.simulation.world import World

FIRST_WALL_MS = 1_700_000_000_000


@dataclass(slots=True)
class Journal:
    record: QuorumRecord | None = None


class Lighthouse:
    """The place: what outlives a process of it."""

    def __init__(self, world: World, network: Network, config: QuorumConfig, checkers: Checkers) -> None:
        self.world = world
        self.network = network
        self.config = config
        self.checkers = checkers
        self.journal = Journal()
        self.process: LighthouseProcess | None = None
        self.starts = 0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_up

    def wall_ms(self) -> int:
        return FIRST_WALL_MS + int(self.world.now * 1000)

    def start(self) -> None:
        if self.is_up:
            return
        self.starts += 1
        self.process = LighthouseProcess(self)

    def kill(self, back_after_s: float) -> None:
        if self.process is not None and self.process.is_up:
            self.process.kill()
        self.world.after(back_after_s, self.start)

    def lose_journal(self) -> None:
        """To be called while it is down."""
        self.journal.record = None

    def change_lease(self, lease_s: float) -> None:
        """From the next start on."""
        self.config = replace(self.config, lease_s=lease_s)
