"""Collectives of the script's own groups, and the report of a process about itself. The Flight Recorder is played."""

import json
import queue
import re
import signal
import sys
import threading
from typing import Any

import pytest

from agent_client.progress import script_groups
from agent_client.progress.script_groups import (
    NEWEST_ENTRIES,
    STILL_S,
    ScriptGroups,
    SelfReporter,
    flight_recorder,
    newest_going_on,
    shortened,
)
from lighthouse_protocol.messages.incident import MAX_FLIGHT_RECORDER_BYTES, SelfReport
from lighthouse_protocol.messages.progress import MAX_BEFORE, MAX_GROUPS, GroupCalls
from tests.processes import PATIENCE_S, Process, eventually


class Torch:
    """`counts` by group; the newest collective of each is in `going_on`, or over."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counts: dict[str, int] = {}
        self.going_on: set[str] = set()
        self.hangs = threading.Event()
        self.dumps = 0

    def read_recorders(self, *, with_entries: bool) -> list[dict[str, Any]]:
        if self.hangs.is_set():
            threading.Event().wait(60)
        self.dumps += with_entries
        numbers = {name: str(number) for number, name in enumerate(self.counts)}
        told = {
            numbers[name]: {
                "last_enqueued_collective": str(count),
                "last_completed_collective": str(count - (name in self.going_on)),
            }
            for name, count in self.counts.items()
        }
        entries = [entry(int(number), name, retired=name not in self.going_on) for name, number in numbers.items()]
        return [{"pg_status": told, "entries": entries if with_entries else None}]


def entry(number: int, name: str, operation: str = "gloo:all_reduce", **fields: Any) -> dict[str, Any]:
    kept = {"is_p2p": False, "retired": False, "state": "scheduled", "input_sizes": [[3, 4]]}
    return {"pg_id": number, "process_group": [name, ""], "profiling_name": operation, **kept, **fields}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setattr(script_groups, "_counts", lambda: dict(torch.counts))
    monkeypatch.setattr(script_groups, "read_recorders", torch.read_recorders)
    return torch


@pytest.fixture
def groups(torch: Torch) -> ScriptGroups:
    return ScriptGroups(lambda: torch.now)


def looked(groups: ScriptGroups) -> tuple[GroupCalls, ...]:
    """Once what has been looked up is there."""
    groups.read_calls()
    assert eventually(lambda: groups._recorder._reader is not None and not groups._recorder._reader.is_alive())
    return groups.read_calls()


def test_the_group_that_moved_last_is_the_first(torch: Torch, groups: ScriptGroups):
    assert groups.read_calls() == ()
    torch.counts = {f"{number}": 1 for number in range(2 * MAX_GROUPS)}
    groups.read_calls()
    torch.counts["7"] = 2
    newest, *others = groups.read_calls()
    assert (newest, len(others), groups.total) == (GroupCalls("7", 2), MAX_GROUPS - 1, 2 * MAX_GROUPS + 1)


def test_what_goes_on_is_looked_up_once_nothing_has_moved_for_a_while(torch: Torch, groups: ScriptGroups):
    torch.counts, torch.going_on = {"0": 5, "1": 9}, {"1"}
    assert {calls.is_inside for calls in groups.read_calls()} == {False}
    torch.now += STILL_S
    inside = GroupCalls("1", 9, True, "all_reduce", "3x4")
    assert looked(groups) == (inside, GroupCalls("0", 5))
    assert groups.moved_at == 100
    for _ in range(3):
        assert looked(groups)[0] == inside
    assert torch.dumps == 1, "all entries take long to read"
    torch.going_on = set()
    assert looked(groups)[0] == GroupCalls("1", 9)
    assert groups.moved_at == torch.now, "leaving a collective is progress"
    torch.counts["1"] = 10
    assert groups.read_calls()[0] == GroupCalls("1", 10)


def test_a_recorder_that_hangs_holds_nothing_up(torch: Torch, groups: ScriptGroups):
    torch.counts = {"0": 5}
    groups.read_calls()
    torch.hangs.set()
    torch.now += STILL_S
    for _ in range(3):
        assert groups.read_calls() == (GroupCalls("0", 5),)


def test_the_newest_of_each_group_in_which_one_goes_on():
    gloo = [entry(0, "0", "gloo:broadcast"), entry(0, "0", retired=True), entry(1, "1", is_p2p=True)]
    nccl = [
        entry(0, "2", "nccl:_all_gather_base", retired=True),
        entry(0, "2", "nccl:_reduce_scatter_base"),
        entry(1, "3", "nccl:_all_gather_base", state="completed"),
    ]
    found = newest_going_on([{"entries": gloo}, {"entries": nccl}, {}])
    assert {number: [each["profiling_name"] for each in entries] for number, entries in found.items()} == {
        (0, 0): ["gloo:broadcast", "gloo:all_reduce"],
        (1, 0): ["nccl:_reduce_scatter_base"],
    }
    many = [entry(0, "0", "gloo:broadcast") for _ in range(2 * MAX_BEFORE)]
    assert len(newest_going_on([{"entries": many}])[0, 0]) == MAX_BEFORE + 1


def test_what_was_entered_at_once_is_told_in_its_order(
    torch: Torch, groups: ScriptGroups, monkeypatch: pytest.MonkeyPatch
):
    """DDP sends its buffers so: one broadcast for each dtype."""
    torch.counts, torch.going_on = {"0": 16}, {"0"}
    read, three = torch.read_recorders, ["gloo:reduce", "gloo:broadcast", "gloo:all_reduce"]
    entries = [entry(0, "0", operation, retired=operation == "gloo:reduce") for operation in three]
    monkeypatch.setattr(
        script_groups,
        "read_recorders",
        lambda *, with_entries: [dump | {"entries": entries} for dump in read(with_entries=with_entries)],
    )
    groups.read_calls()
    torch.now += STILL_S
    assert looked(groups) == (GroupCalls("0", 16, True, "all_reduce", "3x4", ("broadcast",)),)


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
        assert re.search(r'\n  File ".*test_script_groups\.py", line \d+ in wait_inside\n', other)
        assert "lighthouse evidence" not in own.stacks
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
    (looks or SelfReporter()).send_evidence(number, sent.put)
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
