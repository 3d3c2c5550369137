"""The log file of a rank: its name can be guessed, and what waits under that name is not trusted."""

import os
import stat
from pathlib import Path

import pytest

from manager.guard.child import open_log


def test_it_and_its_folder_are_for_this_user_alone_and_it_is_appended_to(tmp_path: Path):
    path = tmp_path / "logs" / "a" / "rank0.log"
    for text in (b"first\n", b"second\n"):
        log = open_log(str(path))
        assert log is not None
        with log:
            log.write(text)
    assert path.read_bytes() == b"first\nsecond\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert open_log(None) is None


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "second name", "folder"])
def test_what_another_has_put_there_is_refused_at_once(tmp_path: Path, kind: str):
    path, other = tmp_path / "rank0.log", tmp_path / "other"
    other.write_text("kept")
    match kind:
        case "link":
            path.symlink_to(other)
        case "dangling link":
            path.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(path)
        case "second name":
            path.hardlink_to(other)
        case _:
            path.mkdir()
    with pytest.raises(OSError, match=str(path)):
        open_log(str(path))
    assert other.read_text() == "kept"
    assert not (tmp_path / "nothing").exists()


def test_a_pipe_that_is_read_is_refused_too(tmp_path: Path):
    path = tmp_path / "rank0.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="no plain file of this user alone"):
            open_log(str(path))
    finally:
        os.close(reader)
