"""Lines and log files of ranks."""

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.guard.child import (
    MAX_LINE_BYTES,
    MAX_TAIL_CHARS,
    PIECE_BYTES,
    TAIL_LINES,
    Child,
    Lines,
    OutputQueue,
    open_log,
)


@given(st.lists(st.binary(max_size=20)))
def test_no_byte_is_lost(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    assert found + lines.end() == (expected[:-1] if expected[-1] == b"" else expected)


def test_a_line_that_does_not_end_is_cut() -> None:
    lines = Lines()
    assert lines.feed(b"x" * (2 * MAX_LINE_BYTES + 1)) == [b"x" * MAX_LINE_BYTES] * 2
    assert lines.end() == [b"x"]


def test_the_tail_is_the_last_lines_that_say_something() -> None:
    lines = Lines()
    lines.feed(b"".join(b"%d\n\n" % i for i in range(100)))
    assert lines.current_tail == [str(i) for i in range(100 - TAIL_LINES, 100)]
    assert lines.kept == [str(i) for i in range(100)]


def test_the_tail_is_safe_to_show() -> None:
    lines = Lines()
    lines.feed(b"10%\r100%\n\x1b[31mred\n\xff\n" + b"y" * 1000 + b"\n")
    assert lines.kept == ["100%", "\N{REPLACEMENT CHARACTER}[31mred", "\N{REPLACEMENT CHARACTER}", "y" * MAX_TAIL_CHARS]


def test_while_it_is_written_a_line_without_an_end_counts() -> None:
    lines = Lines()
    lines.feed(b"".join(b"%d\n" % i for i in range(100)) + b"epoch 3:  10%\repoch 3:  20%\r")
    assert lines.current_tail == [*(str(i) for i in range(101 - TAIL_LINES, 100)), "epoch 3:  20%"]
    assert lines.kept == [str(i) for i in range(100)]
    lines.feed(b"done\n")
    assert lines.current_tail == lines.kept[-TAIL_LINES:]
    assert lines.kept[-1] == "done"


@given(st.lists(st.binary(max_size=3000), max_size=20), st.integers(1, PIECE_BYTES))
def test_the_outlet_gives_all_in_order_and_in_pieces(lines: list[bytes], most: int) -> None:
    outlet, written = OutputQueue(), b""
    outlet.put("[a/0] ", lines)
    while piece := outlet.next_chunk():
        assert len(piece) <= PIECE_BYTES
        written += piece[:most]
        outlet.consume(len(piece[:most]))
    assert written == b"".join(b"[a/0] " + line + b"\n" for line in lines)
    assert not outlet.has_data
    assert not outlet.is_full


def test_it_is_full_by_its_bytes() -> None:
    outlet = OutputQueue(limit_bytes=10)
    outlet.put("", [b"12345678"])
    assert not outlet.is_full
    outlet.put("", [b""])
    assert outlet.is_full


def test_it_and_its_folder_are_for_this_user_alone_and_it_is_appended_to(tmp_path: Path):
    path = tmp_path / "logs" / "a" / "rank0.log"
    for text in (b"first\n", b"second\n"):
        log = open_log(str(path))
        with log:
            log.write(text)
    assert path.read_bytes() == b"first\nsecond\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


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
        with pytest.raises(OSError, match="not a regular file of this user only"):
            open_log(str(path))
    finally:
        os.close(reader)


def test_a_file_that_cannot_grow_is_said_once_and_written_again(tmp_path: Path):
    path = tmp_path / "rank0.log"
    child = Child(1, "a/0", True, str(path), tmp_path / "error.json")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert child.open_log() == ""
        assert child.write_log(b"a" * 600) == ""
        said = child.write_log(b"b" * 600)  # 400 of them fit
        assert child.write_log(b"c" * 600) == "", "the first failure was said"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == f"cannot write {path}: File too large; the rank continues, and the log is retried later"
    assert child.write_log(b"d") == f"{path} is writable again; 800 bytes are missing before this line"
    assert child.write_log(b"e") == ""
    child.close()
    assert path.read_bytes() == b"a" * 600 + b"b" * 400 + b"de"


def test_a_folder_that_cannot_be_made_yet_does_not_keep_a_rank_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    child = Child(1, "a/0", True, str(tmp_path / "logs" / "rank0.log"), tmp_path / "error.json")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        assert "Disk quota exceeded; the rank continues" in child.open_log()
    assert child.write_log(b"") == ""
    child.write_log(b"text")
    child.close()
    assert (tmp_path / "logs" / "rank0.log").read_bytes() == b"text"
