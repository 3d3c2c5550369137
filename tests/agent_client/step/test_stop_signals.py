"""SIGTERM to a rank that no supervisor drains, and Agents that are open at exit."""

import signal
import subprocess
import sys

import pytest
import torch

from agent_client import Agent, AgentConfig, TrainState
from agent_client.step.stop_signals import opened
from tests.processes import LOCALHOST, PATIENCE_S, ROOT, clean_environment


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


SCRIPT = """
import logging, os, signal, sys, threading, time
from types import SimpleNamespace
from agent_client.step import stop_signals
from lighthouse_protocol.refusals import Unreachable

case, drained = sys.argv[1], threading.Event()

def drain(reason):
    if case == "unreachable":
        raise Unreachable("the manager is gone")
    print(reason, flush=True)
    drained.set()

manager = SimpleNamespace(drain=drain, watch=SimpleNamespace(is_open=case != "unknown"))
signals = stop_signals.StopSignals(manager, 3)
if case == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: print("own", flush=True) or sys.exit(0))
if case == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
signals.install()
me = os.getpid()
if case == "nohup":
    os.kill(me, signal.SIGHUP)
    sys.exit(7)
if case == "closed":
    signals.uninstall()
os.kill(me, signal.SIGTERM)
os.kill(me, signal.SIGTERM)  # torchrun's, beside its scheduler's
assert drained.wait(60)
if case == "again":
    stop_signals.SAME_WITHIN_S = 0.0
    os.kill(me, signal.SIGTERM)
    time.sleep(60)
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("drains", 5, "SIGTERM to rank 3\n"),
        ("again", -signal.SIGTERM, "SIGTERM to rank 3\n"),
        ("own handler", 0, "own\n"),
        ("nohup", 7, ""),
        ("unknown", -signal.SIGTERM, ""),
        ("unreachable", -signal.SIGTERM, ""),
        ("closed", -signal.SIGTERM, ""),
    ],
)
def test_what_a_stop_signal_does(case: str, status: int, said: str) -> None:
    ended = run("-c", SCRIPT, case)
    assert (ended.returncode, ended.stdout) == (status, said), ended.stderr


WORKER = """
import os, signal, time
from types import SimpleNamespace
from agent_client.step.stop_signals import StopSignals

signals = StopSignals(SimpleNamespace(drain=lambda reason: None, watch=SimpleNamespace(is_open=True)), 0)
signals.install()
reading, writing = os.pipe()
worker = os.fork()
if worker == 0:
    os.write(writing, b"r")
    time.sleep(600)
os.read(reading, 1)
os.kill(worker, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def test_a_worker_that_is_forked_ends_by_the_signal() -> None:
    ended = run("-c", WORKER)
    assert ended.stdout == f"{-signal.SIGTERM} False\n", ended.stderr


OPENS_FOUR = """
import os, sys
from agent_client.step.stop_signals import close_at_end, opened, forget_closed

class Opened:
    def __init__(self, name):
        self.name = name
        close_at_end(self, is_of_process=name == "of the process")

    def close(self):
        forget_closed(self)
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


def test_each_is_closed_once_whatever_becomes_of_the_others_and_by_no_forked_child() -> None:
    ended = run("-c", OPENS_FOUR)
    assert ended.returncode == 3
    before, *at_end = ended.stdout.splitlines()
    assert before == "closed before"
    assert sorted(at_end) == ["broken", "of the process", "one"]
    assert "RuntimeError: it breaks" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_ends_with_its_own_status_while_a_thread_is_in_torch() -> None:
    ended = run("-m", "tests.agent_client.unclosed", "127.0.0.1:1")
    assert (ended.returncode, ended.stderr) == (3, "")


def test_what_is_open_is_the_agent_that_the_script_holds() -> None:
    """A wrapped function keeps it in CallWrapper.agent, by which it is left open."""
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    agent = Agent("127.0.0.1:1", state=state, config=AgentConfig(advertise=LOCALHOST))
    assert agent in opened()
    agent.close()
    assert agent not in opened()
