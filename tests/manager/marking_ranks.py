"""Ranks of one group that mark where they are, on one virtual clock, and the manager that hears of it."""

from agent_client.progress.progress import Progress
from lighthouse_protocol.messages.progress import RankView
from lighthouse_protocol.rules.stall import StallVerdict
from manager.group.rules.progress import GroupProgress, Process


class MarkingRanks:
    """They are in step 2 when they are made. `clock` is the present moment."""

    def __init__(self, size: int, *, is_started: bool = True) -> None:
        self.now = 1000.0
        self.ranks = [Progress(lambda: self.now) for _ in range(size)]
        self.manager = GroupProgress()
        self.rank_incarnation = "w"
        if is_started:
            for number in range(3):
                for rank in self.ranks:
                    rank.step(number)
                self.go(1.0)

    def go(self, by_s: float) -> None:
        self.now += by_s

    def beat(self) -> None:
        """Every rank's sample comes to the manager, now."""
        for number, rank in enumerate(self.ranks):
            self.manager.take(number, Process(self.rank_incarnation), rank.sample(), self.now)

    def verdict(self) -> StallVerdict | None:
        self.beat()
        return self.manager.verdict(self.now, is_complete=True)

    def after(self, still_s: float) -> str:
        """What the verdict says when nobody has marked for so long; beats come all the time."""
        self.go(still_s)
        verdict = self.verdict()
        return "" if verdict is None else verdict.text

    def view(self, number: int) -> RankView:
        self.beat()
        return self.manager.ranks(self.now)[number]
