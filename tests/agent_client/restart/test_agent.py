"""Two groups of two ranks with an Agent, below the decorator: what fails in one comes back in its processes."""

import re
import statistics
import sys
from contextlib import ExitStack

import pytest

from examples.ports import free_port
from tests.daemons.supervisors import QUICK, Supervisor
from tests.processes import ROOT, Lighthouse, together

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, FAULTS = 1000, 6  # the peers make 50 steps a second: the slower a restart, the fewer faults before the end
BACK_WITHIN_S = 10.0  # in the median, on a machine that does much else; benchmarks/restart has what it takes


STOPS = """
import os, time
from agent_client import CallWrapper, RestartAbort, Wrapper

@Wrapper(use_global_iteration=True, restart_scope="group")
def train(call_wrapper: CallWrapper):
    if os.environ["REPLICA_GROUP_ID"] == "a":
        raise RestartAbort("enough")
    while True:
        call_wrapper.ping()
        time.sleep(0.1)

train()
"""


def supervisor(lighthouse: str, name: str, faults: int, end: str) -> Supervisor:
    ports = ("--store", "auto", "--master-port", str(free_port()), "--store-port", str(free_port()))
    script = [sys.executable, "-m", "tests.agent_client.restart.agent_training", str(STEPS), "1", str(faults), end]
    return Supervisor(lighthouse, "--nproc-per-node", "2", *QUICK, *ports, command=script, replica_id=name)


def took_s(log: str) -> list[float]:
    """From each fault to the group's next committed step."""
    told = re.findall(r"\] (fault|begins|committed) ([\d.]+)", log)
    times: list[float] = []
    failed_at = begun = 0.0
    for kind, number in told:
        if kind == "fault":
            failed_at, begun = float(number), 0
        elif kind == "begins":
            begun += 1
        elif failed_at and begun == 2:
            times.append(float(number) - failed_at)
            failed_at = 0.0
    return times


@pytest.mark.parametrize("end", ["closes", "leaves"])
def test_its_peers_go_on_and_it_heals_from_them(end: str) -> None:
    """`leaves`: the script leaves its Agent open when it fails."""
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse())
        both = [supervisor(lighthouse.address, "a", FAULTS, end), supervisor(lighthouse.address, "b", 0, end)]
        a, b = stack.enter_context(together(*both))
        statuses = [each.wait(300) for each in (a, b)]
        log, other = a.log(), b.log()
    assert statuses == [0, 0], log
    times = took_s(log)
    assert len(times) >= FAULTS / 2, log
    print(f"back after {statistics.median(times):.2f} s in the median, {max(times):.2f} s at most")
    assert statistics.median(times) < BACK_WITHIN_S
    assert len(set(re.findall(r"\] begins \d+ (\d+) ", log))) == 2, "no process was replaced"
    ends = re.findall(r"\] ends (\d+) (\S+) (\d+)$", log + other, re.MULTILINE)
    assert [int(step) for step, _, _ in ends] == [STEPS] * 4
    assert len({digest for _, digest, _ in ends}) == 1
    ours, theirs = [int(threads) for _, _, threads in ends[:2]], [int(threads) for _, _, threads in ends[2:]]
    assert min(ours) <= max(theirs) + 2, "nothing is left of what was ended"


def test_a_stop_is_for_all_groups_of_the_run() -> None:
    with Lighthouse() as lighthouse:
        command = [sys.executable, "-c", STOPS]
        both = [
            Supervisor(lighthouse.address, *QUICK, command=command, replica_id=name, env={"PYTHONPATH": str(ROOT)})
            for name in "ab"
        ]
        with together(*both) as (a, b):
            assert (a.wait(120), b.wait(120)) == (130, 130), b.log()
