"""A rank that hangs in C with the interpreter lock, under supervisors: its stack is taken, and training goes on."""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.ports import free_port
from tests.agent_client.jobs import ask
from tests.daemons.supervisors import Supervisor
from tests.processes import Lighthouse, eventually, http_get

STEPS = 60
OPTIONS = ("--join-timeout", "2s", "--heartbeat-timeout", "3s", "--min-replicas", "2", "--stall-timeout", "8s")
COMMAND = (sys.executable, "-m", "tests.agent_client.holding_script", str(STEPS))


def supervisor(lighthouse: Lighthouse, name: str) -> Supervisor:
    ports = ("--store", "auto", "--store-port", str(free_port()), "--master-port", str(free_port()))
    times = ("--stall-timeout", "8s", "--restart-delay", "100ms", "--max-startup-failures", "0")
    return Supervisor(lighthouse.address, *ports, *times, "--nproc-per-node", "2", command=COMMAND, replica_id=name)


def only_incident(lighthouse: Lighthouse) -> dict[str, Any]:
    [incident] = ask(lighthouse.address, "incidents")
    return incident


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_group_of_a_rank_that_hangs_is_restarted_and_training_goes_on(tmp_path: Path) -> None:
    options = (*OPTIONS, "--on-stall", "restart-suspects", "--incident-dir", str(tmp_path))
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse(*options))
        groups = [stack.enter_context(supervisor(lighthouse, name)) for name in "ab"]
        lighthouse.wait_for_log("recovered: the next step was committed", within_s=240)
        assert [group.wait(240) for group in groups] == [0, 0], "nobody but the lighthouse has helped"
        assert all(f"has done {STEPS} steps" in group.log() for group in groups)

        incident = ask(lighthouse.address, "incident", only_incident(lighthouse)["id"])
        assert (incident["kind"], incident["suspects"]) == ("stall", ["b/1"])
        # "behind in matching", or "behind, last seen ...", where its last word was older than that
        assert incident["text"].startswith("b/1 behind"), incident["text"]
        assert incident["action"] == "killed b, whose ranks are behind"
        order = [incident[name] for name in ("noticed_s", "evidence_s", "acted_s", "quorum_s", "step_s")]
        assert order == sorted(order)
        assert incident["evidence_s"] - incident["noticed_s"] < 11
        first, *others = incident["evidence"]
        assert (first["replica_id"], first["group_rank"]) == ("b", 1)
        assert re.search(r'holding_script\.py", line \d+ in match_for_ever', first["stacks"])
        assert first["output"][-1] == "matching"
        assert "R (running)" in first["process"]
        assert [f"{rank['replica_id']}/{rank['group_rank']}" for rank in others] == ["a/0", "a/1", "b/0"]
        assert "all_reduce" in others[0]["flight_recorder"]

        filed = eventually(lambda: list(tmp_path.glob("*.json")), "it is filed")
        assert json.loads(filed[0].read_bytes()) == incident
        scraped = http_get(lighthouse.http + "/metrics")[1]
        for name in ("incident_detection", "incident_recovery"):
            assert f'lighthouse_{name}_seconds_count{{job="default",kind="stall"}} 1.0' in scraped
    with Lighthouse("--incident-dir", str(tmp_path)) as after:
        assert only_incident(after)["id"] == incident["id"], "a lighthouse that starts again still has it"
