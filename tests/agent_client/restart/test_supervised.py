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
    if len(sys.argv) > 1:
        sys.exit(130)

train()
print("has finished", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("abort",), 130)], ids=["done", "abort"])
def test_a_script_that_is_killed_is_started_again(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3])))
    become = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with Lighthouse() as lighthouse:
        variables = {"LIGHTHOUSE_ADDRESS": lighthouse.address, "LIGHTHOUSE_MANAGER_BIND": "127.0.0.1:0"}
        variables |= {"LIGHTHOUSE_MANAGER_STORE": "127.0.0.1:1", "LIGHTHOUSE_MANAGER_ADVERTISE": "127.0.0.1"}
        with Process(become, [str(script), *arguments], env=variables) as monitored:
            assert monitored.wait(300) == status, monitored.log()
            log = monitored.log()
            assert log.index("begins None") < log.index("begins 0") < log.index("runs 0") < log.index("begins 1")
            assert log.index("begins 1") < log.index("runs 100")
            assert ("has finished" in log) == (status == 0)
