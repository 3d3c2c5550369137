"""What a process says of what it is doing."""

import json
import queue
import re
import signal
import sys
import threading
from typing import Any

import pytest

from agent_client.progress import script_groups
from agent_client.progress.script_groups import NEWEST_ENTRIES, SelfReporter, flight_recorder, shortened
from lighthouse_protocol.messages.incident import MAX_FLIGHT_RECORDER_BYTES, SelfReport
from tests.processes import PATIENCE_S, Process, eventually

NOW = 1_700_000_000.0
ENTRY: dict[str, Any] = {
    "collective_seq_id": 7,
    "p2p_seq_id": 3,
    "is_p2p": False,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[3]],
    "output_sizes": [[3]],
    "input_dtypes": ["Float"],
    "state": "scheduled",
    "retired": True,
    "time_created_ns": int((NOW - 2.5) * 1e9),
    "frames": ["much"] * 100,
}

OFFERS = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()
faulthandler.register(signal.SIGRTMIN + 10)
signal.signal(signal.SIGRTMIN + 11, signal.SIG_IGN)
from agent_client.progress.script_groups import offer
first = offer()
assert offer() == first
if (child := os.fork()) == 0:
    again = offer()
    os._exit(again.signal == first.signal or again.descriptor == first.descriptor)
assert os.waitpid(child, 0)[1] == 0
def held_up():
    print("offers", first.signal, first.descriptor, flush=True)
    threading.Event().wait()
threading.Thread(target=held_up, daemon=True).start()
threading.Event().wait()
"""


class TestTheHandler:
    def test_a_signal_has_all_stacks_written_and_disturbs_nothing(self):
        with Process(OFFERS) as process:
            number, descriptor = map(int, process.wait_for_log(r"^offers (\d+) (\d+)$").groups())
            assert number == signal.SIGRTMIN + 12, "the two before it are in use"
            process.signal(number)
            with open(f"/proc/{process.pid}/fd/{descriptor}") as file:
                eventually(lambda: file.seek(0) or "in <module>" in file.read())
                file.seek(0)
                stacks = file.read()
            assert "in held_up" in stacks
            assert len(re.findall("^(Current thread|Thread) 0x", stacks, re.MULTILINE)) == 2
            assert process.is_alive

    def test_without_a_free_signal_it_is_said_and_nothing_else_changes(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        monkeypatch.setattr(script_groups, "_SIGNALS", ())
        monkeypatch.setattr(script_groups, "_offered", {})
        assert script_groups.offer() == script_groups.EvidenceOffer(0, 0)
        assert "every real-time signal has a handler already" in caplog.text


class TestOwnEvidence:
    def test_stacks_of_all_threads(self):
        done = threading.Event()
        thread = threading.Thread(target=self.wait_inside, args=(done,), name="the waiting one")
        thread.start()
        try:
            own = answered(5)
        finally:
            done.set()
            thread.join()
        *others, main = own.stacks.split("\n\n")
        assert main.startswith(f"Thread 0x{threading.main_thread().ident:016x} MainThread (most recent call first):")
        assert "in test_stacks_of_all_threads" in main
        [other] = [other for other in others if "the waiting one (most recent call first):" in other]
        assert re.search(r'\n  File ".*test_self_report\.py", line \d+ in wait_inside\n', other)
        assert "lighthouse look" not in own.stacks
        assert own.number == 5

    def test_a_deep_recursion_is_cut(self):
        def descend(left: int) -> str:
            return descend(left - 1) if left else answered(1).stacks

        stacks = descend(150)
        assert stacks.count("in descend") < 100
        assert "\n  ..." in stacks

    def wait_inside(self, done: threading.Event) -> None:
        done.wait(PATIENCE_S)

    def test_without_torch_there_is_no_recorder_and_it_is_not_imported(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
        assert flight_recorder() == ""
        assert answered(1).missing == ("Flight Recorder: this process has recorded no collective",)

    def test_a_recorder_that_fails_costs_nothing_else(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(script_groups, "flight_recorder", lambda: 1 / 0)
        own = answered(1)
        assert own.stacks
        assert own.missing == ("Flight Recorder: ZeroDivisionError('division by zero')",)

    def test_torch_may_hang_and_stacks_are_given_all_the_same(self, monkeypatch: pytest.MonkeyPatch):
        go_on, began = threading.Event(), list[int]()

        def hang() -> str:
            began.append(1)
            go_on.wait(PATIENCE_S)
            return "[]"

        monkeypatch.setattr(script_groups, "RECORDED_WITHIN_S", 0.05)
        monkeypatch.setattr(script_groups, "flight_recorder", hang)
        looks = SelfReporter()
        for number in (1, 2):
            own = answered(number, looks)
            assert own.stacks
            assert own.missing == ("Flight Recorder: no answer from torch within 0.05 s",)
        assert len(began) == 1, "it is not asked again while it hangs"
        go_on.set()
        monkeypatch.setattr(script_groups, "RECORDED_WITHIN_S", PATIENCE_S)
        assert answered(3, looks).flight_recorder == "[]"


def answered(number: int, looks: SelfReporter | None = None) -> SelfReport:
    sent = queue.SimpleQueue[SelfReport]()
    (looks or SelfReporter()).answer(number, sent.put)
    return sent.get(timeout=PATIENCE_S)


class TestEntries:
    def test_what_helps_of_an_entry(self):
        assert json.loads(shortened([ENTRY], NOW)) == [
            {
                "group": "default_pg",
                "seq": 7,
                "operation": "gloo:all_reduce",
                "input_sizes": [[3]],
                "output_sizes": [[3]],
                "dtypes": ["Float"],
                "state": "scheduled",
                "retired": True,
                "age_s": 2.5,
            }
        ]

    def test_another_version_of_torch_may_say_less(self):
        [shown] = json.loads(shortened([{}], NOW))
        assert (shown["group"], shown["seq"], shown["age_s"]) == ("#0", 0, None)

    def test_a_message_between_two_ranks_has_its_own_number(self):
        assert json.loads(shortened([{**ENTRY, "is_p2p": True}], NOW))[0]["seq"] == 3

    def test_the_newest_are_kept(self):
        entries = [{**ENTRY, "collective_seq_id": n} for n in range(100)]
        assert [e["seq"] for e in json.loads(shortened(entries, NOW))] == list(range(100 - NEWEST_ENTRIES, 100))

    def test_and_as_many_as_a_message_takes(self):
        entries = [{**ENTRY, "collective_seq_id": n, "input_sizes": [[1] * 500]} for n in range(100)]
        text = shortened(entries, NOW)
        assert len(text) <= MAX_FLIGHT_RECORDER_BYTES
        assert json.loads(text)[-1]["seq"] == 99
        assert shortened([{**ENTRY, "input_sizes": [[1] * 99999]}], NOW) == ""
