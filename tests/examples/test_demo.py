"""The demo's own judgement: each fault it looks for is found. The demo itself is run by CI."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.daemons import ROOT
from examples.demo_report import EventFiles, Kill, Report
from tests.processes import eventually

STEPS = 10


def commit(step: int, **changes: object) -> dict[str, object]:
    base = {"time": float(step), "step": step, "quorum_id": 7, "participants": 3, "hash": f"h{step}"}
    return base | {"loss": 1.0, "contributed": True} | changes


def good_report() -> Report:
    report = Report(groups=3)
    for group in range(3):
        name = f"group-{group}-rank-0-start-1.jsonl"
        for step in range(1, STEPS + 1):
            report.add(name, commit(step))
        report.add(name, {"time": 11.0, "finished": STEPS, "accuracy": 0.97, "hash": f"h{STEPS}"})
    return report


def test_a_good_run_has_no_problems() -> None:
    assert good_report().problems(STEPS, ranks=1) == []


@pytest.mark.parametrize("field", ["hash", "quorum_id"])
def test_one_differing_commit_is_found(field: str) -> None:
    report = good_report()
    report.add("group-1-rank-0-start-1.jsonl", commit(4, **{field: 8}))
    assert report.differing_steps() == [4]
    assert "1 steps, first 4" in report.problems(STEPS, ranks=1)[0]


def test_survivors_that_stop_are_found() -> None:
    assert "stopped at step 10 of 11" in good_report().problems(STEPS + 1, ranks=1)[0]


def test_a_rank_that_does_not_finish_is_found() -> None:
    report = good_report()
    report.finished.popitem()
    assert "2 of 3 ranks ended" in report.problems(STEPS, ranks=1)[0]


def test_a_group_that_has_not_returned_at_the_end_is_found() -> None:
    report = good_report()
    for participant in list(report.commits[report.last_step]):
        report.add(participant, commit(report.last_step, participants=2))
    assert report.problems(STEPS, ranks=1) == [
        "a killed group had not returned when the training ended; give it time: --steps 3000"
    ]


def test_bad_accuracy_is_found() -> None:
    report = good_report()
    next(iter(report.finished.values()))["accuracy"] = 0.9
    assert "test accuracy 90.0%" in report.problems(STEPS, ranks=1)[0]


def test_the_pause_is_the_longest_gap_of_the_survivors_after_the_kill() -> None:
    report = good_report()
    report.add("group-1-rank-0-start-1.jsonl", commit(11, time=13.0))
    report.add("group-2-rank-0-start-1.jsonl", commit(11, time=14.5))
    assert report.pause_s(Kill(8.0, "group-1", "every rank")) == 4.5
    assert report.pause_s(Kill(99.0, "group-1", "every rank")) == float("inf")


def test_a_healing_participants_loss_does_not_count() -> None:
    report = good_report()
    report.add("group-1-rank-0-start-1.jsonl", commit(4, loss=9.0, contributed=False))
    assert report.loss(4) == 1.0


def test_files_are_read_as_they_grow_and_half_lines_wait(tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    path = tmp_path / "group-0-rank-0-start-1.jsonl"
    line = json.dumps(commit(1))
    path.write_text(line + "\n" + line[:5])
    assert files.new() == [(path.name, commit(1))]
    assert files.new() == []
    with path.open("a") as file:
        file.write(line[5:] + "\n")
    assert files.new() == [(path.name, commit(1))]


def test_impossible_arguments_are_refused() -> None:
    command = [sys.executable, "-m", "examples.demo", "--kill-at", "9", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "two kills in order" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_ended_ends_all_that_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    heeds = ["env", "--default-signal=INT"]  # a test run in the background may have it ignored
    script = [*heeds, sys.executable, "-m", "examples.demo", "--ranks", "1", "--logs", str(tmp_path)]
    with subprocess.Popen(script, cwd=ROOT, stdout=subprocess.DEVNULL) as demo:
        eventually(lambda: len(started_by(tmp_path)) >= 2, "the lighthouse and a manager run")
        demo.send_signal(number)
        assert demo.wait(60.0) == 128 + number
    eventually(lambda: not started_by(tmp_path), "all have ended", within_s=30.0)


def started_by(folder: Path) -> list[int]:
    """The processes that are told to write there, but for the demo itself."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = entry.read_bytes()
            if os.fsencode(folder) in text and b"examples.demo" not in text:
                found.append(int(entry.parent.name))
    return found
