"""The document's layout: the ranks of two hosts that together are as many as a group, and are none."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from agent_client.manager_client.client import ManagerConnection
from examples.ports import free_port
from lighthouse_protocol.messages.membership import Assignment, World
from lighthouse_protocol.refusals import DeadlinePassed
from lighthouse_runtime.client.clients import LighthouseClient
from tests.processes import (
    LIGHTHOUSE_CODE,
    LOCALHOST,
    PATIENCE_S,
    Lighthouse,
    Manager,
    Process,
    eventually,
    run_cli,
    together,
)

pytestmark = pytest.mark.slow

SIZE = 8
SOON_S = 3.0
HALVES = "a has ranks 0-3 of 8; missing: 4-7; b has ranks 4-7 of 8; missing: 0-3"


@dataclass
class Ranks:
    """Of several groups, each with a watch of its own, as an Agent holds it."""

    links: dict[tuple[str, int], ManagerConnection] = field(default_factory=dict)

    def start(self, manager: Manager, name: str, ranks: range) -> None:
        for rank in ranks:
            self.links[name, rank] = ManagerConnection(
                manager.address, rank, f"{name}{rank}", lambda quorum_id, reason: None, returns_within_s=0.0
            )

    def ask(self, timeout_s: float) -> dict[tuple[str, int], Assignment | Exception]:
        """All at once; what each is answered."""

        def one(link: ManagerConnection) -> Assignment | Exception:
            try:
                return link.ask(0, "", tag_quorum_id=0, commit_failures=0, timeout_s=timeout_s)
            except DeadlinePassed as e:
                return e

        with ThreadPoolExecutor(len(self.links)) as threads:
            return dict(zip(self.links, threads.map(one, self.links.values()), strict=True))

    def worlds(self) -> set[World | None]:
        return {link.watch.world for link in self.links.values()}


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    try:
        yield found
    finally:
        for link in found.links.values():
            link.close()


def test_halves_of_two_groups_get_no_quorum_until_the_other_halves_come() -> None:
    with Lighthouse() as lighthouse, ranks() as grid:
        managers = [Manager(lighthouse.address, name, ranks=SIZE) for name in "ab"]
        with together(*managers) as (a, b), LighthouseClient(lighthouse.address) as client:
            grid.start(a, "a", range(4))
            grid.start(b, "b", range(4, 8))
            refused = grid.ask(SOON_S)
            for (name, rank), error in refused.items():
                assert isinstance(error, DeadlinePassed), f"{name}/{rank} was let in"
                half = "a has ranks 0-3 of 8; missing: 4-7" if name == "a" else "b has ranks 4-7 of 8; missing: 0-3"
                assert half in str(error)
            [job] = client.status().jobs
            assert (job.quorum_id, job.verdict) == (0, "no_joins")
            assert HALVES in job.explanation
            shown = run_cli(LIGHTHOUSE_CODE, "status", "--lighthouse", lighthouse.address).stdout
            assert HALVES in " ".join(shown.split())
            eventually(lambda: grid.worlds() == {World(8, 1, 8, 8)}, "every rank is told the world")
            lighthouse.wait_for_log(f"{HALVES}; a replica group joins only when all its ranks are connected")
            a.wait_for_log(r"a has ranks 0-3 of 8; missing: 4-7; a replica group joins only when")

            grid.start(a, "a", range(4, 8))
            grid.start(b, "b", range(4))
            admitted = grid.ask(PATIENCE_S)
            for (name, rank), answer in admitted.items():
                assert isinstance(answer, Assignment), f"{name}/{rank}: {answer}"
                assert answer.replica_ids == ("a", "b")
            eventually(lambda: grid.worlds() == {World(16, 2, 0, 8)}, "all are there")
            lighthouse.wait_for_log("all replica groups are complete")


AGENT = """
import time, torch
from agent_client import Agent, TrainState

model = torch.nn.Linear(1, 1)
with Agent.from_env(state=TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))):
    print("met", flush=True)
    time.sleep(600)
"""


def test_an_agent_that_waits_for_the_other_ranks_of_its_group_is_seen_and_they_are_named() -> None:
    pytest.importorskip("torch")
    missing = "c has rank 0 of 2; missing: 1"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(free_port())}

    def agent(rank: int, manager: Manager) -> Process:
        variables = {"RANK": str(rank), "LIGHTHOUSE_MANAGER_ADDRESS": manager.address, "OMP_NUM_THREADS": "1"}
        return Process(AGENT, env=place | variables)

    with Lighthouse("--join-timeout", "2s") as lighthouse, ranks() as grid:
        managers = [Manager(lighthouse.address, name, ranks=2, store="auto") for name in "ac"]
        with together(*managers) as (a, c), LighthouseClient(lighthouse.address) as client:
            grid.start(a, "a", range(2))
            grid.ask(PATIENCE_S)
            with agent(0, c) as first:
                eventually(lambda: missing in client.status().jobs[0].explanation, "the status names it")
                eventually(lambda: grid.worlds() == {World(3, 2, 1, 2)}, "the other group counts it")
                shown = run_cli(LIGHTHOUSE_CODE, "ranks", "--lighthouse", lighthouse.address).stdout
                assert "c/0" in shown, shown
                first.wait_for_log(rf"rank 0 waits for the group at {LOCALHOST}:\d+: {missing}")
                c.wait_for_log(f"{missing}; a replica group joins only when")
                with agent(1, c) as second:
                    second.wait_for_log("met")
                    first.wait_for_log("met")
                    eventually(lambda: grid.worlds() == {World(4, 2, 0, 2)}, "all are there")
                    assert missing not in client.status().jobs[0].explanation
