"""Replica groups of real processes under one lighthouse: managers, and the ranks that a test tells what to do."""

import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_runtime.client.clients import ManagerClient
from tests.agent_client.ranks import Pending, Rank, RankServer
from tests.processes import LIGHTHOUSE_CODE, PATIENCE_S, eventually, run_cli

AGENT = "tests.agent_client.actors:AgentActor"
# Where nothing stands, a group that is ahead waits at its next step, so that scripted ranks meet where a test says so.
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s", "--standing-quorum", "off")

_jobs = itertools.count()


class Job:
    """Replica groups of one rank (or more, by `ranks`), each with a manager of its own."""

    _starts = itertools.count()

    def __init__(self, lighthouse: str, store: str, server: RankServer, folder: Path, stack: ExitStack) -> None:
        self.lighthouse = lighthouse
        self.store = store
        self._server = server
        self.folder = folder
        self._stack = stack
        self.name = f"job-{next(_jobs)}"
        self.managers: dict[str, Rank] = {}
        self.addresses: dict[str, str] = {}

    def start_managers(self, *names: str, ranks: int = 1, **settings: Any) -> None:
        for name in names:
            manager = self._server.start("tests.agent_client.actors:ManagerActor", self.folder / f"{name}-manager.log")
            self.managers[name] = self._stack.enter_context(manager)
            self.addresses[name] = manager.call(
                "serve",
                lighthouse=self.lighthouse,
                replica_id=name,
                job=self.name,
                store=self.store,
                group_world_size=ranks,
                **settings,
            )
        self.wait_beats(*names)

    def rank(self, name: str, seed: int = 0, *, actor: str = AGENT, **options: Any) -> Rank:
        """A new process for the group `name`, whose weights are drawn from `seed`."""
        rank = self.started(name, actor)
        if options.get("ranks", 1) > 1:
            options["meeting"] = self.store
        rank.call("build", self.addresses[name], seed=seed, **options)
        return rank

    def started(self, name: str, actor: str) -> Rank:
        """A new process for the group `name`, which has not been built yet: the ranks of a group meet in that."""
        return self._stack.enter_context(self._server.start(actor, self.folder / f"{name}.log"))

    def groups(self, *names: str, seed: int = 0, **options: Any) -> list[Rank]:
        """Each with weights of its own."""
        self.start_managers(*names)
        return [self.rank(name, seed + place, **options) for place, name in enumerate(names)]

    def groups_of(self, ranks: int, *names: str, seed: int = 0, actor: str = AGENT, **options: Any) -> dict[str, Rank]:
        """New processes, "a/0", "a/1", "b/0" ..., and the managers that are missing. The ranks of a group have the same
        weights, and meet while they are built."""
        self.start_managers(*(name for name in names if name not in self.managers), ranks=ranks)
        begun: dict[str, Rank] = {}
        building: list[Pending] = []
        for place, name in enumerate(names):
            options["key"] = f"{self.name}/{name}/{next(self._starts)}"
            for number in range(ranks):
                at = {"rank": number, "ranks": ranks, "meeting": self.store}
                rank = begun[f"{name}/{number}"] = self.started(name, actor)
                building.append(rank.begin("build", self.addresses[name], seed=seed + place, **at, **options))
        for pending in building:
            pending.result()
        return begun

    def wait_beats(self, *names: str) -> None:
        """Until the lighthouse knows these groups."""
        for name in names:
            self._wait(name, lambda status: status.lighthouse_reachable, "has sent a heartbeat")

    def wait_joined(self, name: str) -> None:
        """Until the group waits for a quorum."""
        self._wait(name, lambda status: status.phase == "joined", "has joined")

    def elsewhere(self) -> "Job":
        """Another job under the same lighthouse."""
        return Job(self.lighthouse, self.store, self._server, self.folder, self._stack)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _wait(self, name: str, is_so: Callable[[ManagerStatus], bool], what: str) -> None:
        with ManagerClient(self.addresses[name]) as client:
            eventually(lambda: is_so(client.status(timeout_s=PATIENCE_S)), f"{name} {what}")


def ask(address: str, *words: str) -> Any:
    """What the lighthouse's command line answers to that."""
    told = run_cli(LIGHTHOUSE_CODE, *words, "--lighthouse", address, "--format", "json", "--timeout", "60s")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)
