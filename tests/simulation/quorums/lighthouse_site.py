"""Where the lighthouse runs: its journal, its settings, and what outlives a process of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lighthouse.job.records import QuorumConfig, QuorumRecord, dump_quorum, parse_quorum
from lighthouse_protocol.messages.membership import Quorum
from tests.simulation.network import LIGHTHOUSE_HOST, End, Network
from tests.simulation.quorums.checkers import Checkers
from tests.simulation.quorums.lighthouse_checks import Ledger
from tests.simulation.quorums.lighthouse_process import LighthouseProcess
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group

FIRST_WALL_S = 1_700_000_000.0
KEPT = 10
DISK_RETRY_S = 0.5
# An id that is a day above the clock is refused as one that was never given out.
MAX_WALL_OFFSET_S = 43_200.0


class Journal:
    """Records as they were written, one after the other; the disk below it may be slow or full."""

    def __init__(self) -> None:
        self.records: list[QuorumRecord] = []
        self.write_s = 0.0
        self.is_full = self.tears_next = False

    @property
    def record(self) -> QuorumRecord | None:
        return self.records[-1] if self.records else None

    def write(self, record: QuorumRecord) -> None:
        self.records.append(parse_quorum(dump_quorum(record)))
        del self.records[:-KEPT]

    def lose(self, writes: int | None) -> None:
        del self.records[slice(None) if writes is None else slice(-writes, None)]


class Lighthouse:
    """The place: what outlives a process of it."""

    def __init__(
        self, world: World, network: Network, config: QuorumConfig, checkers: Checkers, host: str = LIGHTHOUSE_HOST
    ) -> None:
        self.host = host
        self.wall_offset_s = self.most_offset_s = 0.0  # now, and at most so far
        self.world = world
        self.network = network
        self.config = config
        self.checkers = checkers
        self.journal = Journal()
        self.ledger = Ledger()
        self.process: LighthouseProcess | None = None
        self.starts = 0
        self.refuses_until = 0.0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_up

    def wall(self) -> float:
        """Seconds since the epoch."""
        return FIRST_WALL_S + self.world.now + self.wall_offset_s

    def find(
        self, group: "Group", connected: Callable[[End], None], failed: Callable[[], None]
    ) -> "tuple[Lighthouse, Callable[[End], None], Callable[[], None]]":
        """Where a group connects to, and what it does when it has, or has not."""
        return self, connected, failed

    def speaks(self, process: LighthouseProcess) -> None:
        """It is about to."""

    def told(self, quorum: Quorum) -> None:
        """Somebody is about to be."""
        self.checkers.told(quorum, self.journal.record, self.host)

    def start(self) -> None:
        """It writes at its start; while the disk is full it cannot."""
        if self.is_up:
            return
        if self.journal.is_full:
            self.world.after(DISK_RETRY_S, self.start)
            return
        self.network.boot(self.host)
        self.starts += 1
        self.process = LighthouseProcess(self)

    def kill(self, back_after_s: float) -> None:
        if self.process is not None and self.process.is_up:
            self.process.kill()
        self.world.after(back_after_s, self.start)

    def close_connections(self, for_s: float) -> None:
        """By what lies between it and the groups, and refuses new ones: the process notices no more than that."""
        assert self.process is not None
        self.refuses_until = max(self.refuses_until, self.world.now + for_s)
        self.network.close_all(self.process)

    def vanish(self, back_after_s: float) -> None:
        """Its host loses its power: nobody is told."""
        if self.process is not None and self.process.is_up:
            self.network.vanish(self.process)
        self.kill(back_after_s)

    def lose_journal(self, writes: int | None = None) -> None:
        """To be called while it is down. `writes`: the newest ones only. Ids are safe by the journal or by the wall
        clock: who sets that back and loses the journal, too, has neither."""
        self.wall_offset_s = self.most_offset_s
        self.journal.lose(writes)
        self.ledger.lost_journal()

    def set_wall_clock(self, by_s: float) -> None:
        self.wall_offset_s = max(-MAX_WALL_OFFSET_S, min(MAX_WALL_OFFSET_S, self.wall_offset_s + by_s))
        self.most_offset_s = max(self.most_offset_s, self.wall_offset_s)
        if self.ledger.is_blank:
            self.wall_offset_s = self.most_offset_s

    def change_lease(self, lease_s: float) -> None:
        """From the next start on."""
        self.config = replace(self.config, lease_s=lease_s)
