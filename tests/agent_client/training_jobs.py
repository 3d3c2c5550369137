"""Replica groups that train as actors of ranks.py under real daemons, to kill and to start again."""

import itertools
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lighthouse_runtime.client.lighthouse import LighthouseClient
from tests.agent_client.clusters import read_events
from tests.agent_client.ranks import Pending, Rank, RankEnded, RankError, RankServer
from tests.processes import PATIENCE_S, eventually

Event = dict[str, Any]


class Group:
    """One replica group: its manager's process and address, its ranks and what they are doing."""

    def __init__(self, name: str, manager: Rank, address: str) -> None:
        self.name = name
        self.manager = manager
        self.address = address
        self.ranks: list[Rank] = []
        self.training: list[Pending] = []
        self.starts = 0
        self.has_manager = True

    def kill(self, *, with_manager: bool = False) -> None:
        """SIGKILL to all ranks at once, and to the manager if it is to die with them."""
        dying = [*self.ranks, *([self.manager] if with_manager else [])]
        for process in dying:
            process.signal(signal.SIGKILL)
        for process in dying:
            process.kill()
        self.ranks, self.training = [], []
        self.has_manager = not with_manager


class TrainingJob:
    """Replica groups in a job of their own. `actor`, "module:Class", has build() and train(pace_s); it writes a line
    of JSON for every step. `options` are build()'s own."""

    _jobs = itertools.count()

    def __init__(
        self,
        lighthouse: str,
        store: str,
        server: RankServer,
        folder: Path,
        stack: ExitStack,
        *,
        actor: str,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        self.folder = folder
        self._lighthouse = lighthouse
        self._store = store
        self._server = server
        self._stack = stack
        self._actor = actor
        self._options = options
        self._ranks = ranks
        self.name = f"training-{next(self._jobs)}"
        self._seeds = itertools.count()

    def group(self, name: str) -> Group:
        """With a manager that serves, and no ranks yet."""
        return Group(name, *self._serve(name))

    def _serve(self, name: str) -> tuple[Rank, str]:
        manager = self._server.start("tests.agent_client.actors:ManagerActor", self.folder / f"{name}-manager.log")
        self._stack.enter_context(manager)
        settings = {"lighthouse": self._lighthouse, "store": self._store, "group_world_size": self._ranks}
        return manager, manager.call("serve", replica_id=name, job=self.name, **settings)

    def groups(self, *names: str) -> list[Group]:
        return [self.group(name) for name in names]

    def build(self, group: Group) -> None:
        """New ranks, whose weights are drawn anew; they do nothing yet. And a manager, if it is gone."""
        if not group.has_manager:
            group.manager, group.address = self._serve(group.name)
            group.has_manager = True
        group.starts += 1
        for number in range(self._ranks):
            rank = self._server.start(self._actor, self._log(group, number))
            group.ranks.append(self._stack.enter_context(rank))
        seed = next(self._seeds)
        building = [
            rank.begin(
                "build",
                group.address,
                events=str(self._events(group, number)),
                seed=seed,
                rank=number,
                ranks=self._ranks,
                meeting=(self._store, f"{self.name}/{group.name}/{group.starts}"),
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
        with LighthouseClient(self._lighthouse, job=self.name) as lighthouse:
            lighthouse.drain(group.name)
        for training in group.training:
            with pytest.raises(RankError, match="GroupDrained"):
                training.result()

    def committed(self, group: Group, rank: int = 0) -> list[Event]:
        """By its present start."""
        return [event for event in read_events(self._events(group, rank)) if "step" in event]

    def discarded(self, group: Group, rank: int = 0) -> list[Event]:
        return [event for event in read_events(self._events(group, rank)) if "discarded" in event]

    def wait_steps(self, *groups: Group, more: int, participants: int) -> None:
        """Until each rank of `groups` has committed so many more steps in quorums of that size."""
        ranks = list(itertools.product(groups, range(self._ranks)))
        before = {(group.name, rank): len(self.committed(group, rank)) for group, rank in ranks}

        def is_done() -> bool:
            self.check_training(*groups)
            new = [self.committed(group, rank)[before[group.name, rank] :] for group, rank in ranks]
            return all(sum(event["participants"] == participants for event in events) >= more for events in new)

        eventually(is_done, f"{more} more steps of {participants} groups in {self.folder}", PATIENCE_S)

    def check_training(self, *groups: Group) -> None:
        for group in groups:
            for number, training in enumerate(group.training):
                try:
                    assert not training.is_done(), f"{group.name} has stopped: {training.result()}"
                except RankEnded:
                    raise AssertionError(f"{group.name} has ended:\n{self.log(group, number)}") from None

    def log(self, group: Group, rank: int = 0) -> str:
        return self._log(group, rank).read_text()

    def _events(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}-start-{group.starts}.jsonl"

    def _log(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}.log"
