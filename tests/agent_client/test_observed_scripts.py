"""Plain torch scripts, of which one rank stays behind: what is told of them, though they say nothing themselves."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.ports import free_port
from tests.agent_client.jobs import ask
from tests.daemons.supervisors import Supervisor
from tests.processes import LOCALHOST, Lighthouse, Process, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STALL = ("--stall-timeout", "4s")
BEGIN = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def load():
    time.sleep(1000)
"""
# Document 003: rank 0 alone has left the validation, and broadcasts what the others never come to.
FREEZE = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(60):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
if rank != 0:
    load()
dist.broadcast(torch.zeros(2), src=0)
"""
# In DDP's own all_reduce, which torch makes in C++.
BACKWARD = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(60):
    loss = net(torch.ones(2, 4)).sum()
    time.sleep(0.05)
    if step == 50 and rank == 2:
        load()
    loss.backward()
"""
SUBGROUPS = """
low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
mine = low if rank < 2 else high
for _ in range(60):
    for _ in range(1 if rank < 2 else 2):
        dist.all_reduce(torch.ones(3), group=mine)
    dist.all_reduce(torch.ones(3))
    time.sleep(0.05)
if rank == 1:
    load()
dist.all_reduce(torch.ones(3), group=mine)
dist.all_reduce(torch.ones(3))
"""
FSDP = """
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in (*net, net):
    fully_shard(layer)
for step in range(30):
    if step == 25 and rank == 1:
        load()
    net(torch.ones(8, 8)).sum().backward()
    time.sleep(0.05)
"""


def script_of(folder: Path, text: str, begin: str = "") -> str:
    script = folder / "train.py"
    script.write_text(begin + BEGIN + text)
    return str(script)


def look(lighthouse: Lighthouse, job: str) -> dict[str, Any]:
    return next((found for found in ask(lighthouse.address, "ranks")["jobs"] if found["job"] == job), {})


@pytest.mark.parametrize(
    ("text", "ranks", "verdict"),
    [
        (FREEZE, 3, "a/1-2 behind in load (train.py:8), a/0 waiting in broadcast"),
        (BACKWARD, 3, "a/2 behind in load (train.py:8), a/0-1 waiting in all_reduce"),
        (SUBGROUPS, 4, "a/1 behind in load (train.py:8), a/0, a/2-3 waiting in all_reduce"),
        (FSDP, 2, "a/1 behind in load (train.py:8), a/0 waiting in all_gather"),
    ],
    ids=["document 003", "backward", "subgroups", "FSDP2"],
)
def test_a_script_is_observed_under_a_supervisor(
    text: str, ranks: int, verdict: str, lighthouse: Lighthouse, tmp_path: Path
) -> None:
    name = tmp_path.name
    options = ("--job", name, *STALL, "--nproc-per-node", str(ranks), "--master-port", str(free_port()))
    command = [sys.executable, script_of(tmp_path, text)]
    with Supervisor(lighthouse.address, *options, command=command) as supervisor:
        eventually(lambda: look(lighthouse, name).get("stall") == verdict, verdict, within_s=180.0)
        places = {place["group_rank"]: place for place in look(lighthouse, name)["ranks"]}
        assert len(places) == ranks
        for place in places.values():
            assert place["state"] == ("behind" if place["at"].startswith("load") else "waiting")
            assert place["done"] > 30
        supervisor.wait_for_log(f"nothing has moved for .*{verdict.split(',')[0].replace('(', '.').replace(')', '.')}")
        behind = next(rank for rank, place in places.items() if place["state"] == "behind")
        [evidence] = ask(lighthouse.address, "stacks", "--rank", f"a/{behind}", "--job", name)["evidence"]
        assert "in load" in evidence["stacks"]
        assert supervisor.stop() == 143
        assert supervisor.gone()


def test_a_script_that_observes_itself_has_a_manager_started(lighthouse: Lighthouse, tmp_path: Path) -> None:
    script = script_of(tmp_path, FREEZE, "import agent_client\nagent_client.observe()")
    become = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(free_port()),
        "LIGHTHOUSE_ADDRESS": lighthouse.address,
        "LIGHTHOUSE_JOB": "solo",
        "REPLICA_GROUP_ID": "solo",
        "LIGHTHOUSE_MANAGER_ADVERTISE": LOCALHOST,
    }
    with ExitStack() as stack:
        ranks = [Process(become, [script], env=variables | {"RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            stack.enter_context(rank)

        told: list[tuple[int, bool, str]] = []

        def seen() -> bool:
            logs = [rank.log() for rank in ranks]
            assert all(rank.is_alive for rank in ranks), logs
            places = look(lighthouse, "solo").get("ranks", ())
            told[:] = sorted((place["group_rank"], place["is_inside"], place["at"]) for place in places)
            return told == [(0, True, "train.py:19"), (1, False, "load (train.py:9)")]

        try:
            eventually(seen, "both ranks where they are", within_s=180.0)
        except AssertionError as e:
            raise AssertionError(f"{e}; told: {told}; logs: {[rank.log() for rank in ranks]}") from None
