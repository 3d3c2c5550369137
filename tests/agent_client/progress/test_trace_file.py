"""What a rank enters, leaves and decides, as lines in a file of its own."""

import os
import re
import threading
from pathlib import Path

import pytest

from agent_client.errors import ConfigurationError
from agent_client.progress.progress import TRACE_VARIABLE, Progress, TraceFile, make_progress
from agent_client.progress.rules import Number

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.log"


@pytest.fixture
def progress(path: Path) -> Progress:
    return Progress(lambda: 5.0, TraceFile(path))


def lines(path: Path) -> list[str]:
    stamped = path.read_text().splitlines()
    assert all(STAMP.match(line) for line in stamped)
    return [STAMP.sub("", line) for line in stamped]


def test_each_entry_and_each_exit_is_a_line(progress: Progress, path: Path) -> None:
    progress.step(812)
    with progress.phase("validation", total=25):
        progress.tick()
        with progress.collective(Number(17, 24), "all_reduce", (4096, 1024)):
            pass
        with progress.collective(Number(17, 25), "all_reduce", "3", within_group=True):
            pass
    with progress.waiting_for("rank 0"), progress.asking("quorum"), progress.busy("heal"):
        pass
    progress.trace_state(812, 17, "0a1b")
    progress.trace_decision(812, 17, is_committed=False)
    progress.trace_decision(812, 18, is_committed=True)
    assert lines(path) == [
        "step 812 enters validation of 25",
        "step 812 enters all_reduce 24 of quorum 17, 4096x1024",
        "step 812 leaves all_reduce 24 of quorum 17, 4096x1024 after 0.000 s",
        "step 812 enters all_reduce 25 of quorum 17 in the group, 3",
        "step 812 leaves all_reduce 25 of quorum 17 in the group, 3 after 0.000 s",
        "step 812 leaves validation of 25 after 0.000 s",
        "step 812 enters the wait for rank 0",
        "step 812 enters the wait for quorum",
        "step 812 enters heal",
        "step 812 leaves heal after 0.000 s",
        "step 812 leaves the wait for quorum after 0.000 s",
        "step 812 leaves the wait for rank 0 after 0.000 s",
        "step 812 has state 0a1b under quorum 17",
        "step 812 is discarded under quorum 17",
        "step 812 commits under quorum 18",
    ]


def test_an_exception_is_named_and_goes_on(progress: Progress, path: Path) -> None:
    with pytest.raises(ValueError, match="bad"), progress.phase("checkpoint"):
        raise ValueError("bad")
    assert lines(path)[-1] == "step 0 leaves checkpoint after 0.000 s, by ValueError"


def test_samples_are_those_of_a_rank_without_a_log(path: Path) -> None:
    logged, plain = Progress(lambda: 5.0, TraceFile(path)), Progress(clock=lambda: 5.0)
    for progress in (logged, plain):
        progress.step(1)
        with progress.phase("loader", total=3):
            progress.tick()
        progress.step(2)
        progress.phase("validation").__enter__()
        progress.collective(Number(3, 1), "all_reduce", (2,)).__enter__()
    assert logged.sample() == plain.sample()


def test_lines_of_threads_do_not_mix(path: Path) -> None:
    log = TraceFile(path)
    texts = [letter * 500 for letter in "abcd"]
    threads = [threading.Thread(target=lambda text=text: [log.write(text) for _ in range(200)]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = lines(path)
    assert len(written) == 800
    assert set(written) == set(texts)


def test_a_disk_that_fails_ends_the_log_and_not_the_rank(
    progress: Progress, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with progress.phase("validation"):
            pass
    with progress.phase("validation"):
        pass
    assert path.read_text() == ""
    assert caplog.messages == [f"{path}: tracing stopped: No space left on device"]


def test_the_variable_names_the_folder_and_each_process_has_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    progress = make_progress(3, {TRACE_VARIABLE: str(folder), "REPLICA_GROUP_ID": "team/a"})
    with progress.phase("validation"):
        pass
    assert [path.name for path in folder.iterdir()] == [f"team%2Fa-rank-3-{os.getpid()}.log"]


def test_a_later_process_with_the_same_pid_has_its_own_file(tmp_path: Path) -> None:
    """As in a container that is started again, whose rank may go on from an older checkpoint."""
    for step in (9, 3, 5):
        progress = make_progress(0, {TRACE_VARIABLE: str(tmp_path), "REPLICA_GROUP_ID": "a"})
        progress.trace_decision(step, 1, is_committed=True)
    name = f"a-rank-0-{os.getpid()}"
    found = {path.name: lines(path) for path in tmp_path.iterdir()}
    assert found == {
        f"{name}.log": ["step 9 commits under quorum 1"],
        f"{name}-2.log": ["step 3 commits under quorum 1"],
        f"{name}-3.log": ["step 5 commits under quorum 1"],
    }


@pytest.mark.parametrize("variables", [{}, {TRACE_VARIABLE: ""}])
def test_without_it_there_is_no_log(variables: dict[str, str]) -> None:
    assert make_progress(0, variables).trace is None


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=rf"{TRACE_VARIABLE}=.*/file/logs.* cannot be written"):
        make_progress(0, {TRACE_VARIABLE: str(tmp_path / "file" / "logs")})
