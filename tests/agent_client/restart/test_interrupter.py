"""What is done to a function that is over: its groups, its thread, and at last its process."""

import os
import threading
import time
from pathlib import Path

import pytest

from agent_client.collectives import group_spec
from agent_client.restart.interrupter import KILLED_STATUS, Interrupter, InterruptibleSection, Interruption
from lighthouse_runtime.client.clients import LighthouseClient
from tests.processes import Lighthouse, Process, eventually

STUCK = """
import hashlib
from agent_client import Wrapper

@Wrapper(use_global_iteration=True, hard_timeout=1)
def train():
    print("is stuck", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, without the interpreter's lock

train()
"""


def cpu_s(pid: int) -> float:
    """Of its main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Group:
    def __init__(self, error: Exception | None = None) -> None:
        self.aborts = 0
        self.error = error

    def abort(self) -> None:
        self.aborts += 1
        if self.error is not None:
            raise self.error


def test_every_living_group_is_aborted() -> None:
    groups = [Group(), Group(RuntimeError("it was of no use already")), Group()]
    for group in groups:
        group_spec.register_group(group)
    gone = Group()
    group_spec.register_group(gone)
    del gone
    group_spec.abort_all()
    assert [group.aborts for group in groups] == [1, 1, 1]


def test_an_abort_that_fails_does_not_hold_up_the_exception() -> None:
    section = InterruptibleSection()
    aborts = [Group(ValueError("broken")), Group()]
    hands = Interrupter(section, [each.abort for each in aborts])
    hands.arm()

    def train() -> None:
        threading.Thread(target=hands.interrupt, args=["why"]).start()
        time.sleep(60)

    with pytest.raises(Interruption):
        section.run(train, lambda: False)
    section.stop_delivery()
    hands.disarm()
    assert [each.aborts for each in aborts] == [1, 1]
    hands.interrupt("late")  # nothing runs: nothing is aborted
    hands.arm()
    hands.disarm()
    assert [each.aborts for each in aborts] == [1, 1]


def test_no_line_runs_after_a_wait_that_an_abort_has_ended() -> None:
    """A kernel of NCCL that is aborted looks as if it had completed: what is saved after it is anything."""
    section, kernel_ended = InterruptibleSection(), threading.Event()
    saved: list[str] = []

    def abort() -> None:
        kernel_ended.set()
        time.sleep(0.1)  # its other groups

    hands = Interrupter(section, [abort])
    hands.arm()

    def train() -> None:
        threading.Timer(0.05, hands.interrupt, ["why"]).start()
        kernel_ended.wait()
        saved.append("checkpoint")

    with pytest.raises(Interruption):
        section.run(train, lambda: False)
    section.stop_delivery()
    hands.disarm()
    assert not saved


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_stays_in_c_code_ends_with_its_process_and_shows_where() -> None:
    with Lighthouse() as lighthouse:
        with Process(STUCK, env={"LIGHTHOUSE_ADDRESS": lighthouse.address}) as rank:
            rank.wait_for_log("is stuck")
            began_s = cpu_s(rank.pid)
            eventually(lambda: cpu_s(rank.pid) > began_s + 0.2, "it computes: it says that it is stuck just before")
            with LighthouseClient(lighthouse.address) as client:
                client.stop_run("enough")
            assert rank.wait() == KILLED_STATUS
            assert "still runs 1 s after its interruption: enough" in rank.log()
            assert "in train" in rank.log()
