"""fork_and_monitor() and the real supervisor: a script that dies begins the next hundred."""

from pathlib import Path

import pytest

from tests.processes import Lighthouse, Process

SCRIPT = """
import logging, os, sys
sys.path.insert(0, {root!r})
from agent_client import CallWrapper, Wrapper, fork_and_monitor

print("begins", os.environ.get("LIGHTHOUSE_ATTEMPT"), flush=True)
fork_and_monitor("--restart-delay", "0.1s")

@Wrapper(use_global_iteration=True)
def train(call_wrapper: CallWrapper):
    print("runs", call_wrapper.iteration, flush=True)
    call_wrapper.ping()
    if call_wrapper.iteration < 100:
        os.kill(os.getpid(), 9)

train()
print("has finished", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_that_is_killed_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3])))
    become = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with Lighthouse() as lighthouse:
        variables = {"LIGHTHOUSE_ADDRESS": lighthouse.address, "LIGHTHOUSE_MANAGER_BIND": "127.0.0.1:0"}
        variables |= {"LIGHTHOUSE_MANAGER_STORE": "127.0.0.1:1", "LIGHTHOUSE_MANAGER_ADVERTISE": "127.0.0.1"}
        with Process(become, [str(script)], env=variables) as monitored:
            assert monitored.wait(300) == 0, monitored.log()
            log = monitored.log()
    told = ["begins None", "begins 0", "runs 0", "begins 1", "runs 100", "has finished"]
    assert sorted(told, key=log.index) == told
