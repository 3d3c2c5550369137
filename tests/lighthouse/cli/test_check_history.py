"""`lighthouse check-history`: each broken promise is found in the logs, and a sound history has none."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner, Result

from lighthouse.cli import main
from lighthouse.cli.check_history import MAX_LINE_CHARS, read
from lighthouse_runtime.process.commands import START_LIGHTHOUSE
from tests.lighthouse.cli.conftest import unreadable

SECONDS = "2026-11-28T07:41:{:09.6f}Z"
STARTED = (
    "2026-11-28T07:40:59Z I manager.server.daemon: manager 0.1.0 of {} ({}) serves on 10.0.0.1:29511; "
    "store 10.0.0.1:29600; lighthouse lighthouse://head:29510"
)
RECEIVED = "I manager.group.driver: received quorum {} of 2 groups: step {}"
VOTED = "2026-11-28T07:41:00Z D manager.group.driver: step {} of quorum {}: rank {} votes {}, answer: {}"
FORMED = "I lighthouse.job.log: [vision] quorum {}: {}"


class Folder:
    """Logs of two groups of two ranks. Both commit steps 0 to 4; b is killed then, and heals to step 8.

    The manager of `a` logs its decisions. Its rank 1 votes no on the first try of step 8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.traces: dict[str, list[str]] = {}
        for group, rank, pid in (("a", 0, 1), ("a", 1, 2), ("b", 0, 3), ("b", 1, 4)):
            self.add(f"{group}-rank-{rank}-{pid}.log", rank, range(5), quorum_id=7, at=0)
        for rank, pid in ((0, 1), (1, 2)):
            self.add(f"a-rank-{rank}-{pid}.log", rank, range(5, 8), quorum_id=8, at=10)
        for group, rank, pid in (("a", 0, 1), ("a", 1, 2), ("b", 0, 13), ("b", 1, 14)):
            if group == "b":
                self.line(f"b-rank-{rank}-{pid}.log", 20, "step 0 enters heal")
            self.add(f"{group}-rank-{rank}-{pid}.log", rank, range(8, 10), quorum_id=9, at=21)
        self.lighthouse = [
            "2026-11-28T07:41:00Z " + FORMED.format(7, "a@0 b@0"),
            "2026-11-28T07:41:10Z " + FORMED.format(8, "a@5"),
            "2026-11-28T07:41:20Z " + FORMED.format(9, "a@8 b@0"),
        ]

        self.manager = [STARTED.format("a", "2 ranks")]
        for quorum_id, steps in ((7, range(5)), (8, range(5, 9)), (9, range(8, 10))):
            self.manager.append(f"2026-11-28T07:41:00Z {RECEIVED.format(quorum_id, steps[0])}")
            for step in steps:
                answer = "discard" if (quorum_id, step) == (8, 8) else "commit"
                votes = ("yes", "no") if answer == "discard" else ("yes", "yes")
                self.manager += [VOTED.format(step, quorum_id, rank, votes[rank], answer) for rank in (0, 1)]

    def line(self, name: str, at: float, text: str) -> None:
        self.traces.setdefault(name, []).append(f"{SECONDS.format(at)} {text}")

    def add(self, name: str, rank: int, steps: range, *, quorum_id: int, at: float) -> None:
        for number, step in enumerate(steps):
            if step % 4 == 0:
                self.line(name, at + number, f"step {step} has state {rank}{step:03x} under quorum {quorum_id}")
            self.line(name, at + number, f"step {step} enters the wait for vote")
            self.line(name, at + number, f"step {step} commits under quorum {quorum_id}")

    def change(self, name: str, old: str, new: str | None) -> None:
        lines = self.traces[name]
        [place] = [i for i, line in enumerate(lines) if line.endswith(old)]
        lines[place : place + 1] = [] if new is None else [lines[place].replace(old, new)]

    def check(self, *options: str) -> Result:
        for name, lines in self.traces.items():
            (self.path / "traces" / name).parent.mkdir(exist_ok=True)
            (self.path / "traces" / name).write_text("".join(f"{line}\n" for line in lines))
        (self.path / "lighthouse.log").write_text("".join(f"{line}\n" for line in self.lighthouse))
        (self.path / "manager.log").write_text("".join(f"{line}\n" for line in self.manager))
        return CliRunner().invoke(main, ["check-history", str(self.path), *options])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_sound_history(folder: Folder) -> None:
    folder.traces["b-rank-0-3.log"].append("2026-11-28T07:4")  # cut by the kill
    result = folder.check()
    assert result.exit_code == 0, result.output
    assert "2 groups, 6 processes, 34 commits of 10 steps under 3 quorums; " in result.output
    assert "logged: 3 quorums by lighthouses, 22 votes by managers" in result.output
    assert result.output.count("kept") == 10


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        ("b-rank-0-13", "step 0 enters heal", None, None),  # the first commit of a process may be any
        ("a-rank-0-1", "step 6 commits under quorum 8", None, "commits step 7 after step 5, without a heal"),
        ("a-rank-0-1", "step 7 commits under quorum 8", "step 6 commits under quorum 8", "step 6 after step 6"),
        ("a-rank-1-2", "step 7 commits under quorum 8", "step 7 commits under quorum 6", "quorum 6 after quorum 8"),
        ("a-rank-1-2", "step 2 commits under quorum 7", None, "step 2 under quorum 7, but rank 1 does not"),
        ("b-rank-0-13", "step 8 commits under quorum 9", "step 7 commits under quorum 9", "rank 0 of a, rank 1 of a"),
        ("b-rank-1-14", "has state 1008 under quorum 9", "has state 1009 under quorum 9", "another state of step 8"),
        ("b-rank-1-4", "step 4 commits under quorum 7", "step 4 commits under quorum 8", "b commits under quorum 8"),
    ],
)
def test_a_broken_promise_is_found(folder: Folder, name: str, old: str, new: str | None, found: str | None) -> None:
    folder.change(f"{name}.log", old, new)
    result = folder.check("--clock-skew", "100ms")
    assert result.exit_code == (1 if found else 0), result.output
    assert (found or "") in result.output
    assert ("BROKEN" in result.output) == (found is not None)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("rank 1 votes no, answer: discard", "rank 1 votes no, answer: commit", "step 8, and manager.log:"),
        ("step 3 of quorum 7: rank 0 votes yes", "step 3 of quorum 7: rank 0 votes no", "commits step 3, and manager"),
        ("3 of quorum 7: rank 0 votes yes, answer: commit",
         "3 of quorum 7: rank 0 votes yes, answer: discard",
         "a has two decisions on step 3"),
        ("received quorum 9 of 2", "received quorum 6 of 2", "a receives quorum 6 after quorum 8"),
        ("received quorum 8 of 2", "received quorum 8 of 1", None),
    ],
)  # fmt: skip
def test_a_promise_that_a_manager_breaks_is_found(folder: Folder, old: str, new: str, found: str | None) -> None:
    folder.manager = [line.replace(old, new) for line in folder.manager]
    result = folder.check()
    assert result.exit_code == (1 if found else 0), result.output
    assert (found or "") in result.output


def test_a_commit_that_the_manager_answered_with_discard_is_found(folder: Folder) -> None:
    for rank, pid in ((0, 1), (1, 2)):
        folder.add(f"a-rank-{rank}-{pid}.log", rank, range(8, 9), quorum_id=8, at=18)
        folder.traces[f"a-rank-{rank}-{pid}.log"].sort()
    assert "rank 1 of a commits step 8, which manager.log:21 discards" in folder.check().output


def test_a_restarted_manager_decides_as_the_one_before(folder: Folder) -> None:
    """A quorum_id may be lower than those of the manager before, which the new one does not know."""
    folder.manager += [
        STARTED.format("a", "2 ranks"),
        f"2026-11-28T07:41:30Z {RECEIVED.format(7, 0)}",
        VOTED.format(9, 9, 0, "yes", "commit"),
    ]
    assert folder.check().exit_code == 0
    folder.manager.append(VOTED.format(9, 9, 1, "yes", "discard"))
    assert "a has two decisions on step 9" in folder.check().output


def test_a_rank_alone_in_its_group_decides_by_its_yes(folder: Folder) -> None:
    """So its manager may count a committed step as discarded. A no is a no, though."""
    folder.manager = [STARTED.format("a", "1 rank"), VOTED.format(4, 7, 0, "yes", "discard")]
    result = folder.check()
    assert result.exit_code == 0
    [line] = [line for line in result.output.splitlines() if "one decision on a step" in line]
    assert line.startswith("- ")
    assert line.endswith("(0 checks)")
    folder.manager += [VOTED.format(5, 8, 0, "no", "commit")]
    assert folder.check().exit_code == 1


def test_a_quorum_that_no_lighthouse_has_formed_is_found(folder: Folder) -> None:
    """Unless it is older or newer than the logs."""
    del folder.lighthouse[1]
    result = folder.check()
    assert result.exit_code == 1
    assert "no lighthouse has logged quorum 8" in result.output
    del folder.lighthouse[0]
    assert folder.check().exit_code == 0


def test_managers_that_log_to_one_file_in_json_are_told_apart(folder: Folder) -> None:
    entries = [
        {"replica_group": group, "message": line.format(*values).partition(": ")[2]}
        for group, line, *values in (
            ("c", STARTED, "c", "2 ranks"), ("d", STARTED, "d", "2 ranks"),
            ("c", RECEIVED, 9, 8), ("d", RECEIVED, 8, 5), ("c", RECEIVED, 9, 8),
        )
    ]  # fmt: skip
    (folder.path / "others.log").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    assert folder.check().exit_code == 0


def test_managers_that_log_to_one_file_in_text_are_not_told_apart(folder: Folder) -> None:
    folder.manager += [STARTED.format("b", "2 ranks"), folder.manager[1], folder.manager[2].replace("yes", "no")]
    folder.manager += [STARTED.format("a", "2 ranks"), folder.manager[2].replace("yes", "no")]
    result = folder.check()
    assert result.exit_code == 0, result.output
    assert "22 votes by managers" in result.output


@pytest.mark.parametrize("pids", [("21", "22"), ("1-2", "2-2")], ids=["others", "the same, as in containers"])
def test_a_step_that_nobody_holds_any_more_may_be_committed_again(folder: Folder, pids: tuple[str, str]) -> None:
    """All groups die, and other processes continue from a checkpoint of step 3."""
    for rank, pid in enumerate(pids):
        folder.add(f"a-rank-{rank}-{pid}.log", rank, range(3, 6), quorum_id=12, at=40)
    folder.lighthouse.append("2026-11-28T07:41:39Z " + FORMED.format(12, "a@3"))
    result = folder.check()
    assert result.exit_code == 0, result.output
    assert "8 processes, 40 commits" in result.output


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("2026-11-28T07:41:10Z " + FORMED.format(8, "a@5 b@5"), 1),
        ('{"time": "2026-11-28T07:41:10", "job": "vision", "message": "quorum 8: a@5 b@5"}', 1),
        (r'{"reason": "said \"message\": \"x\"", "job": "vision", "message": "quorum 8: a@5 b@5"}', 1),
        ('{"job": "speech", "message": "quorum 8: c@5"}', 0),
    ],
    ids=["text", "json", "json with escapes", "of another job"],
)
def test_two_lists_under_one_id_are_found(folder: Folder, line: str, status: int) -> None:
    """They may be in the logs of two lighthouses. In JSON, a quote in another field does not end it."""
    (folder.path / "other.log").write_text(f"{line}\n{line[:-9]}\n")
    result = folder.check()
    assert result.exit_code == status
    assert ("quorum 8 has other groups than" in result.output) == (status == 1)


def test_clocks_may_differ(folder: Folder) -> None:
    """Rank 1 of b seems to live on after a commit of rank 0 that it has not written."""
    folder.change("b-rank-1-4.log", "step 4 commits under quorum 7", None)
    folder.line("b-rank-1-4.log", 4.5, "step 4 enters the wait for vote")
    assert folder.check("--clock-skew", "1s").exit_code == 0
    assert folder.check("--clock-skew", "0.1s").exit_code == 1


def test_without_commits_nothing_is_said_to_be_right(tmp_path: Path) -> None:
    (tmp_path / "lighthouse.log").write_text("2026-11-28T07:41:00Z " + FORMED.format(7, "a@0") + "\n")
    result = CliRunner().invoke(main, ["check-history", str(tmp_path)])
    assert result.exit_code == 2
    assert "--trace-dir" in result.output


def test_a_line_that_a_kill_has_cut_is_no_commit(folder: Folder) -> None:
    """Quorum 12 would otherwise be read as quorum 1."""
    folder.traces["a-rank-0-1.log"] = [
        line.replace("quorum 9", "quorum 12") for line in folder.traces["a-rank-0-1.log"]
    ]
    folder.check()
    trace = folder.path / "traces" / "a-rank-0-1.log"
    trace.write_text(trace.read_text().removesuffix("2\n"))
    assert "commits under quorum 1 " not in CliRunner().invoke(main, ["check-history", str(folder.path)]).output


@pytest.mark.parametrize("name", ["team/a", "host:1/a", "a@b+c=d"])
def test_a_group_has_the_same_name_in_traces_as_in_logs(folder: Folder, name: str) -> None:
    """In the name of a file, some of its characters are escaped."""
    folder.traces = {
        file.replace("a-rank", f"{quote(name, safe='@+=')}-rank") if file.startswith("a-") else file: lines
        for file, lines in folder.traces.items()
    }
    folder.lighthouse = [line.replace("a@", f"{name}@") for line in folder.lighthouse]
    folder.manager = [line.replace(" of a ", f" of {name} ") for line in folder.manager]
    result = folder.check()
    assert result.exit_code == 0, result.output
    assert result.output.count("kept") == 10


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-28T07:41:0.5Z step 5 commits under quorum 7",
        "2026-13-28T07:41:00.500000Z step 5 commits under quorum 7",
        f"2026-11-28T07:41:00.500000Z step {'5' * 5000} commits under quorum 7",
        f"2026-11-28T07:41:00.500000Z step 5 commits under quorum {'7' * 5000}",
        f"2026-11-28T07:41:00Z {FORMED.format('7' * 5000, 'a@0')}",
        '{"message": ' + "[" * 50_000,
        "\0" * 100,
    ],
)
def test_a_damaged_line_is_skipped(folder: Folder, line: str) -> None:
    folder.traces["b-rank-1-4.log"].append(line)
    folder.lighthouse.append(line)
    result = folder.check()
    assert result.exit_code == 0, result.output
    assert "34 commits of 10 steps under 3 quorums; logged: 3 quorums" in result.output


def test_a_file_that_is_no_log_takes_no_memory(folder: Folder) -> None:
    with (folder.path / "model.bin").open("wb") as file:
        file.truncate(64 * 2**20)
    tracemalloc.start()
    try:
        assert folder.check().exit_code == 0
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_a_line_that_is_too_long_is_skipped_as_a_whole(folder: Folder) -> None:
    """Its end may look like a line."""
    line = f"2026-11-28T07:41:10Z {FORMED.format(8, 'a@5 b@5')}"
    folder.lighthouse.append("x" * MAX_LINE_CHARS + line)
    assert folder.check().exit_code == 0
    folder.lighthouse.append(line)
    assert "lighthouse.log:5: quorum 8 has other groups than" in folder.check().output


def test_a_folder_that_cannot_be_read_is_not_left_out(folder: Folder) -> None:
    folder.check()
    with unreadable(folder.path / "traces"), pytest.raises(PermissionError):
        read(folder.path)


@pytest.mark.parametrize("name", ["other.log", "traces/a-rank-0-99.log"])
def test_a_log_that_cannot_be_read_is_named(folder: Folder, name: str) -> None:
    """Without it, a broken promise would count as kept; and status 1 would mean that one is broken."""
    folder.check()
    (folder.path / name).symlink_to("/proc/self/mem")  # reading it fails, also as root
    result = folder.check()
    assert result.exit_code == 2
    assert "Input/output error; nothing was checked" in result.output


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_reader_that_has_gone_changes_no_result(folder: Folder, is_broken: bool) -> None:
    if is_broken:
        folder.lighthouse.pop(1)
    folder.check()
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", START_LIGHTHOUSE, "check-history", str(folder.path)]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert ended.returncode == is_broken, ended.stderr
    assert ("no lighthouse has logged quorum 8" in ended.stderr) == is_broken


def test_an_output_that_cannot_be_written_is_an_error_of_one_line(folder: Folder) -> None:
    folder.check()
    command = [sys.executable, "-c", START_LIGHTHOUSE, "check-history", str(folder.path)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.stderr == "Error: cannot write to stdout: No space left on device\n"
