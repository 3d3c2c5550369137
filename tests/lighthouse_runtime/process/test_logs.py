"""What a daemon logs."""

import json
import logging

import pytest

from lighthouse_runtime.process.logs import set_up_logging


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Set up anew, and as it was afterwards."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    return root


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_text_has_the_time_the_level_and_who(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    logging.getLogger("x.y").warning("a %s", "word")
    assert last_line(capsys).endswith("Z W x.y: a word")


def test_what_others_sent_moves_no_terminal(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    logging.getLogger("x").error("killed by %s: %s", "somebody", "\x1b[2Jü\u202e")
    assert last_line(capsys).endswith(r"E x: killed by somebody: \x1b[2Jü\u202e")


def test_a_traceback_keeps_its_lines(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    try:
        raise ValueError("\x07")
    except ValueError:
        logging.getLogger("x").exception("bad")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("E x: bad")
    assert lines[-1] == r"ValueError: \x07"
    assert len(lines) > 3


def test_json_is_one_object_a_line(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    logging.getLogger("x").info("two\nlines")
    entry = json.loads(last_line(capsys))
    assert (entry["logger"], entry["level"], entry["message"]) == ("x", "info", "two\nlines")


def test_below_the_level_nothing_is_said(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning", "text")
    logging.getLogger("x").info("word")
    assert capsys.readouterr().err == ""
