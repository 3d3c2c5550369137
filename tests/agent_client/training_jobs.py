"""Replica groups that train as actors of ranks.py under real daemons, to kill and to start again."""

import functools
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lighthouse_runtime.client.clients import LighthouseClient
from tests.agent_client.clusters import read_events, wait_more
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Pending, Rank, RankEnded, RankError

Event = dict[str, Any]


class Group:
    """One replica group: its manager's process, its ranks and what they are doing."""

    def __init__(self, name: str, manager: Rank) -> None:
        self.name = name
        self.manager = manager
        self.ranks: list[Rank] = []
        self.training: list[Pending] = []
        self.starts = 0

    def kill(self, *, with_manager: bool = False) -> None:
        """SIGKILL to all ranks at once, and to the manager if it is to die with them."""
        dying = [*self.ranks, *([self.manager] if with_manager else [])]
        for process in dying:
            process.signal(signal.SIGKILL)
        for process in dying:
            process.kill()
        self.ranks, self.training = [], []


class TrainingJob(Job):
    """Replica groups in a job of their own. `actor`, "module:Class", has build() and train(pace_s); it writes a line
    of JSON for every step. `options` are build()'s own."""

    def __init__(self, *at: Any, actor: str, ranks: int = 1, **options: Any) -> None:
        """`at`: as of a Job."""
        super().__init__(*at)
        self._actor = actor
        self._options = options
        self.ranks = ranks
        self._seeds = itertools.count()

    def group(self, name: str) -> Group:
        """With a manager that serves, and no ranks yet."""
        self.start_managers(name, ranks=self.ranks)
        return Group(name, self.managers[name])

    def all_groups(self, *names: str) -> list[Group]:
        return [self.group(name) for name in names]

    def build(self, group: Group) -> None:
        """New ranks, whose weights are drawn anew; they do nothing yet. And a manager, if it is gone."""
        if not group.manager.is_alive:
            self.start_managers(group.name, ranks=self.ranks)
            group.manager = self.managers[group.name]
        group.starts += 1
        group.ranks = [self.started(f"{group.name}-rank-{number}", self._actor) for number in range(self.ranks)]
        seed = next(self._seeds)
        building = [
            rank.begin(
                "build",
                self.addresses[group.name],
                events=str(self._events(group, number)),
                seed=seed,
                rank=number,
                ranks=self.ranks,
                meeting=self.store,
                key=f"{self.name}/{group.name}/{group.starts}",
                **self._options,
            )
            for number, rank in enumerate(group.ranks)
        ]
        for built in building:
            built.result()

    def train(self, *groups: Group, pace_s: float = 0.1) -> None:
        for group in groups:
            group.training = [rank.begin("train", pace_s) for rank in group.ranks]

    def start(self, *groups: Group, pace_s: float = 0.1) -> None:
        for group in groups:
            self.build(group)
        self.train(*groups, pace_s=pace_s)

    def drain(self, group: Group) -> None:
        """Returns when its ranks have ended their training."""
        with LighthouseClient(self.lighthouse, job=self.name) as lighthouse:
            lighthouse.drain(group.name)
        for training in group.training:
            with pytest.raises(RankError, match="GroupDrained"):
                training.result()

    def events(self, group: Group, rank: int = 0, kind: str = "step") -> list[Event]:
        """By its present start."""
        return [event for event in read_events(self._events(group, rank)) if kind in event]

    def committed(self, group: Group, rank: int = 0) -> list[Event]:
        return self.events(group, rank)

    def discarded(self, group: Group, rank: int = 0) -> list[Event]:
        return self.events(group, rank, "discarded")

    def wait_steps(self, *groups: Group, more: int, participants: int) -> None:
        """Until each rank of `groups` has committed so many more steps in quorums of that size."""
        ranks = [functools.partial(self.committed, *at) for at in itertools.product(groups, range(self.ranks))]
        wait_more(ranks, more, participants, check=functools.partial(self.check_training, *groups))

    def check_training(self, *groups: Group) -> None:
        for group in groups:
            for number, training in enumerate(group.training):
                try:
                    assert not training.is_done(), f"{group.name} has stopped: {training.result()}"
                except RankEnded:
                    raise AssertionError(f"{group.name} has ended:\n{self.log_of(group, number)}") from None

    def log_of(self, group: Group, rank: int = 0) -> str:
        return self.log(f"{group.name}-rank-{rank}")

    def _events(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}-start-{group.starts}.jsonl"


MakeJob = Callable[..., TrainingJob]
"""The fixture `make_job`: of an actor's class, and build()'s options."""
