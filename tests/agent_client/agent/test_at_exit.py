"""An Agent that nobody closes is closed before the interpreter ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent_client import Agent, AgentConfig, TrainState
from agent_client.step.stop_signals import opened
from tests.processes import LOCALHOST, PATIENCE_S, clean_environment

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, sys
from agent_client.step.stop_signals import close_at_end, opened, was_closed

class Opened:
    def __init__(self, name):
        self.name = name
        close_at_end(self, is_of_process=name == "of the process")

    def close(self):
        was_closed(self)
        print(self.name, flush=True)
        if self.name == "broken":
            raise RuntimeError("it breaks")

everything = [Opened(name) for name in ("one", "broken", "of the process", "closed before")]
everything.pop().close()
assert {each.name for each in opened()} == {"one", "broken"}
if os.fork() == 0:
    sys.exit(0)
os.wait()
sys.exit(3)
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_each_is_closed_once_whatever_becomes_of_the_others_and_by_no_forked_child() -> None:
    ended = run("-c", SCRIPT)
    assert ended.returncode == 3
    before, *at_end = ended.stdout.splitlines()
    assert before == "closed before"
    assert sorted(at_end) == ["broken", "of the process", "one"]
    assert "RuntimeError: it breaks" in ended.stderr


def test_what_is_open_is_the_agent_that_the_script_holds() -> None:
    """A wrapped function keeps it in CallWrapper.agent, by which it is left open."""
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    agent = Agent("127.0.0.1:1", state=state, config=AgentConfig(advertise=LOCALHOST))
    assert agent in opened()
    agent.close()
    assert agent not in opened()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_ends_with_its_own_status_while_a_thread_is_in_torch() -> None:
    ended = run("-m", "tests.agent_client.unclosed", "127.0.0.1:1")
    assert (ended.returncode, ended.stderr) == (3, "")
