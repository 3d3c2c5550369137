"""Document 003's script under a supervisor: eight ranks of plain torch, one group, no Agent. Nobody helps it but the
lighthouse; and that has an end."""

import re
import sys

import pytest

from examples.ports import free_port
from tests.agent_client.jobs import ask
from tests.daemons.supervisors import Supervisor
from tests.processes import Lighthouse

STALL_AFTER_S = 3.0
LATE_S = 15.0  # on a machine that does much else; a second on a quiet one
STALLS = ("--stall-timeout", f"{STALL_AFTER_S}s")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def supervisor(lighthouse: Lighthouse, nproc: int, times: int) -> Supervisor:
    ports = ("--master-port", str(free_port()), "--restart-delay", "100ms")
    restarts = ("--max-restarts", "1", "--max-startup-failures", "0", "--nproc-per-node", str(nproc))
    command = (sys.executable, "-m", "tests.agent_client.frozen_script", str(times))
    return Supervisor(lighthouse.address, *ports, *restarts, *STALLS, command=command, replica_id="train")


def test_ranks_that_are_behind_are_restarted_until_the_budget_is_used_up() -> None:
    with Lighthouse(*STALLS, "--on-stall", "restart-suspects") as lighthouse:
        with supervisor(lighthouse, nproc=8, times=1) as cured:
            assert cured.wait(240) == 0, "nobody but the lighthouse has helped"
            assert cured.log().count("trained to the end") == 8
        *_, incident = ask(lighthouse.address, "incidents")
        assert re.match(r"train/1.* behind in batches \(frozen_script.py:\d+\)", incident["text"]), "rank and line"
        assert incident["action"] == "killed train, the only group: train/1-7 behind"
        late_s = incident["noticed_s"] - STALL_AFTER_S
        print(f"{late_s:.1f} s after the limit: {incident['text']}")
        assert late_s < LATE_S
        with supervisor(lighthouse, nproc=2, times=9) as broken:
            assert broken.wait(240) == 130
            assert "the budget of 1 restarts within 3600 s is exhausted; rank 1 is behind" in broken.log()
        assert len(ask(lighthouse.address, "incidents")) >= 3
