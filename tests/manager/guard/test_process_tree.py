"""What /proc tells of a process."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.guard import process_tree
from tests.processes import eventually

MARK = "4711."


@pytest.fixture
def replacing_itself(tmp_path: Path) -> Iterator[int]:
    """A process that is in an exec most of the time."""
    script = tmp_path / "again.sh"
    script.write_text(f"exec /bin/sh {script}\n")
    marked = {process_tree.MARK_VARIABLE: MARK}
    process = subprocess.Popen(["/bin/sh", str(script)], env=marked)
    yield process.pid
    process.kill()
    process.wait()


def test_a_process_in_the_middle_of_an_exec_is_found_by_its_mark(replacing_itself: int) -> None:
    for _ in range(5000):
        assert process_tree.environment(replacing_itself)
    assert process_tree.marked_descendants(os.getpid(), MARK) == [replacing_itself]


def test_a_mark_within_another_variable_is_not_its_own() -> None:
    copied = {"SAVED": f"{process_tree.MARK_VARIABLE}={MARK}", process_tree.MARK_VARIABLE: "4712."}
    process = subprocess.Popen(["/bin/sleep", "600"], env=copied)
    try:
        assert process_tree.marked_descendants(os.getpid(), MARK) == []
        assert process_tree.marked_descendants(os.getpid(), "4712.") == [process.pid]
        assert [process.pid] in [stray.tree for stray in process_tree.strays(os.getpid(), (), [MARK])]
    finally:
        process.kill()
        process.wait()


def test_one_without_an_environment_has_none() -> None:
    process = subprocess.Popen(["/bin/sleep", "600"], env={})
    try:
        assert process_tree.environment(process.pid) == b""
    finally:
        process.kill()
    eventually(lambda: not process_tree._has_memory(process.pid), "it is a zombie")
    assert process_tree.environment(process.pid) == b""
    process.wait()
    assert process_tree.environment(process.pid) == b""
