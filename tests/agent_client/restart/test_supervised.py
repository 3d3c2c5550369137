"""The documents' table in each way of starting, with real processes, and the store on MASTER_PORT + 2 in each."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.process.commands import START_MANAGER
from tests.processes import LOCALHOST, Lighthouse, Process

pytest.importorskip("torch")

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from agent_client import CallWrapper, Wrapper, fork_and_monitor

def say(text):  # in one write: torchrun's ranks share a pipe
    os.write(1, (text + chr(10)).encode())

say(f"begins {{os.environ.get('LIGHTHOUSE_ATTEMPT')}}")
if sys.argv[1] == "monitor":
    fork_and_monitor("--restart-delay", "0.1s")
port = int(os.environ["MASTER_PORT"]) + 2
place = os.environ["RANK"] + os.environ["LOCAL_RANK"]

@Wrapper(use_global_iteration=True, store_kwargs={{"port": port}})
def train(call_wrapper: CallWrapper):
    from torch.distributed import TCPStore

    state, number = call_wrapper.state, call_wrapper.iteration
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    counters = state.global_iteration_counter, state.job_restart_counter, state.ranks_restart_counter
    say(f"row {{state.initial_rank}} {{place}} {{number}} {{counters}}")
    store.add(f"began {{number}}", 1)
    while store.add(f"began {{number}}", 0) < call_wrapper.world_size:
        time.sleep(0.01)
    if number == 0 and state.initial_rank == 0:
        raise RuntimeError("boom")
    if number == 1 and state.initial_rank == 0:
        os.kill(os.getpid(), 9)
    while number < 100:
        time.sleep(0.01)
    say(f"kept {{store.add('began 0', 0)}}")

train()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
RUN = ("-P", "-c", START_MANAGER, "run", "--replica-id", "a", "--restart-delay", "0.1s")
WAYS: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "supervisor": (2, (*RUN, "--nproc-per-node", "2", "--", sys.executable, "-u"), ()),
    "fork_and_monitor of one rank": (1, (), ("monitor",)),
    "fork_and_monitor of several": (2, (*TORCHRUN, "--master-port={port}"), ("monitor",)),
    "torchrun below a supervisor": (2, (*RUN, "--", sys.executable, *TORCHRUN), ()),
    "torchrun alone": (2, (*TORCHRUN, "--master-port={port}", "--max-restarts=1"), ()),
}
"""How many ranks there are, and the words before and behind the script."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_the_documents_table(way: str, tmp_path: Path) -> None:
    """It starts, is restarted in process, then its rank 0 is killed. Both restarts are restarts of the job."""
    ranks, before, behind = WAYS[way]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3])))
    port = free_port("") - 2
    become = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = [word.format(port=port) for word in before]
    with Lighthouse() as lighthouse:
        variables = {"LIGHTHOUSE_ADDRESS": lighthouse.address, "LIGHTHOUSE_MANAGER_BIND": f"{LOCALHOST}:0"}
        variables |= {"LIGHTHOUSE_MANAGER_ADVERTISE": LOCALHOST, "MASTER_PORT": str(port)}
        with Process(become, [*words, str(script), *(behind or ["plain"])], env=variables) as started:
            assert started.wait(300) == 0, started.log()
            log = started.log()
        with LighthouseClient(lighthouse.address) as client:
            incidents = [incident.text for incident in client.incidents()]
    rows = re.findall(r"row (\d) (\d+) (\d+) (\(.*?\))", log)
    expected = {"0": "(0, 0, 0)", "1": "(0, 1, 1)", "100": "(100, 2, 0)"}
    assert {row for row in rows if row[2] in expected} == {
        (str(slot), f"{slot}{slot}", number, counters) for slot in range(ranks) for number, counters in expected.items()
    }, log
    is_supervised = way != "torchrun alone"
    assert any(re.search(r"slot 0 \(.*\): SIGKILL", text) for text in incidents) == is_supervised, incidents
    # Without a supervisor the store is in rank 0's process, and gone with it.
    kept = re.findall(r"kept (\d)", log)  # a generation after 100 says it again
    assert (set(kept), len(kept) >= ranks) == ({str(ranks if is_supervised else 0)}, True), log
    if behind:
        assert sorted(["begins None", "begins 0", "begins 1"], key=log.index) == ["begins None", "begins 0", "begins 1"]
