"""The account of one job: what a scrape shows of its steps, heals and joins."""

from lighthouse.progress.rules.ledger import REASONS, Ledger
from lighthouse_protocol.messages.session import GroupReport
from lighthouse_runtime.metrics.histogram import Histogram

WAIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
HEAL_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
MAX_HEALS_TOLD = 1000
"""Of one report: more are no heals, but a number that is wrong."""


class JobAccount:
    """Each number only grows. For one event loop: no locks."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.commits = 0
        self.discards = dict.fromkeys(REASONS, 0)
        self.heal_bytes = 0
        self.heals = Histogram(HEAL_BOUNDS_S)
        self.waits = Histogram(WAIT_BOUNDS_S)

    def take(self, replica_id: str, report: GroupReport, now: float) -> None:
        """A group's report, in the hello of its session or in a heartbeat."""
        new = self.ledger.take(replica_id, report, now)
        self.commits += new.commits
        for reason in REASONS:
            self.discards[reason] += getattr(new.discards, reason)
        self.heal_bytes += new.healed.bytes
        heals = min(new.healed.heals, MAX_HEALS_TOLD)
        for _ in range(heals):  # of several between two reports, only the sum is known
            self.heals.add(new.healed.seconds / heals)
