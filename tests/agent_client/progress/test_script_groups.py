"""Collectives of the script's own groups, as torch has counted them; the Flight Recorder is played."""

import threading
from typing import Any

import pytest

from agent_client.progress import script_groups
from agent_client.progress.script_groups import STILL_S, ScriptGroups, newest_going_on
from lighthouse_protocol.messages.progress import MAX_BEFORE, MAX_GROUPS, GroupCalls
from tests.processes import eventually


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
    groups.read()
    assert eventually(lambda: groups._recorder._looking is not None and not groups._recorder._looking.is_alive())
    return groups.read()


def test_the_group_that_moved_last_is_the_first(torch: Torch, groups: ScriptGroups):
    assert groups.read() == ()
    torch.counts = {f"{number}": 1 for number in range(2 * MAX_GROUPS)}
    groups.read()
    torch.counts["7"] = 2
    newest, *others = groups.read()
    assert (newest, len(others), groups.total) == (GroupCalls("7", 2), MAX_GROUPS - 1, 2 * MAX_GROUPS + 1)


def test_what_goes_on_is_looked_up_once_nothing_has_moved_for_a_while(torch: Torch, groups: ScriptGroups):
    torch.counts, torch.going_on = {"0": 5, "1": 9}, {"1"}
    assert {calls.is_inside for calls in groups.read()} == {False}
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
    assert groups.read()[0] == GroupCalls("1", 10)


def test_a_recorder_that_hangs_holds_nothing_up(torch: Torch, groups: ScriptGroups):
    torch.counts = {"0": 5}
    groups.read()
    torch.hangs.set()
    torch.now += STILL_S
    for _ in range(3):
        assert groups.read() == (GroupCalls("0", 5),)


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
    groups.read()
    torch.now += STILL_S
    assert looked(groups) == (GroupCalls("0", 16, True, "all_reduce", "3x4", ("broadcast",)),)
