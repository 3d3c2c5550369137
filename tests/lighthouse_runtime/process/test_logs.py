"""What a daemon logs."""

import ast
import json
import logging
from datetime import datetime, timedelta

import pytest

from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.logs import FORMATS, set_up_logging, without_credentials
from tests.processes import ROOT

LEVEL_METHODS = ("debug", "info", "warning", "error", "critical", "exception")


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


def test_what_others_sent_does_not_look_like_a_line_of_the_log(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the name of a phase; a worker's output keeps its margin."""
    set_up_logging("info", "text")
    logging.getLogger("x").error("b/1 behind in %s\n    | its output", "a\n\n2026-01-01T00:00:00Z I x: all is well")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "", "    2026-01-01T00:00:00Z I x: all is well", "    | its output"
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ('API_KEY=abc"def', 'API_KEY=(removed)"def'),
        ('sent {"API_KEY": "abc"}', 'sent {"API_KEY": "(removed)"}'),
        ("HF_TOKEN=abc\nnext", "HF_TOKEN=(removed)\nnext"),
    ],
)
def test_a_json_line_without_its_credentials_is_json(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], said: str, kept: str
) -> None:
    set_up_logging("info", "json")
    logging.getLogger("x").info("%s", said, extra=event("said", words=[said]))
    entry = json.loads(last_line(capsys))
    assert (entry["message"], entry["words"]) == (kept, [kept])


def test_below_the_level_nothing_is_said(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning", "text")
    logging.getLogger("x").info("word")
    assert capsys.readouterr().err == ""


def test_json_has_what_a_line_is_about_as_fields(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json", job="j", replica_group="g")
    told = event("rank_ended", rank=0, step=None, generation=4, quorum_id=17, peer="ipv6:[::1]:5")
    logging.getLogger("x").info("rank %d has ended", 0, extra=told)
    entry = json.loads(last_line(capsys))
    assert datetime.fromisoformat(entry.pop("time")).utcoffset() == timedelta(0)
    assert entry == {
        "level": "info",
        "event": "rank_ended",
        "job": "j",
        "replica_group": "g",
        "rank": 0,
        "quorum_id": 17,
        "generation": 4,
        "peer": "ipv6:[::1]:5",
        "logger": "x",
        "message": "rank 0 has ended",
    }


def test_a_line_of_another_library_has_an_event_too(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    logging.getLogger("asyncio").warning("slow")
    assert json.loads(last_line(capsys))["event"] == "log"


def test_text_says_which_job_and_run_a_line_is_about(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text", job="own")
    logging.getLogger("x").info("stopped", extra=event("run_stopped", job="j", run="r"))
    assert last_line(capsys).endswith("I x: [j/r] stopped")


@pytest.mark.parametrize("form", FORMATS)
def test_a_credential_is_not_logged(form: str, root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", form)
    address = "lighthouse://5f1c.t0ken@head:29510"
    logging.getLogger("x").info("connects to %s", address, extra=event("e", to=address))
    line = last_line(capsys)
    assert "t0ken" not in line
    assert "lighthouse://(removed)@head:29510" in line


def test_every_line_of_a_daemon_says_what_it_is_about() -> None:
    """Each call of a logger in the daemons has an event."""
    without: list[str] = []
    packages = [ROOT / name for name in ("lighthouse", "manager", "lighthouse_runtime")]
    for path in (path for package in packages for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and is_logging(node.func) and "extra" not in {k.arg for k in node.keywords}:
                without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert without == []


def is_logging(function: ast.expr) -> bool:
    """log.info, self._log.warning, (log.info if ... else log.error)."""
    if isinstance(function, ast.IfExp):
        return is_logging(function.body)
    if not isinstance(function, ast.Attribute) or function.attr not in LEVEL_METHODS:
        return False
    owner = function.value
    return ast.unparse(owner) in ("log", "self._log")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at lighthouse://ab12.lhj_SECRETsecret@h:1", "at lighthouse://(removed)@h:1"),
        ("token lho_abcdefghij-_K rotated", "token (removed) rotated"),
        ("AWS_SECRET_ACCESS_KEY=swordfish", "AWS_SECRET_ACCESS_KEY=(removed)"),
        ("{'LIGHTHOUSE_MANAGER_SECRET': 'ab', 'X': '1'}", "{'LIGHTHOUSE_MANAGER_SECRET': '(removed)', 'X': '1'}"),
        ("LIGHTHOUSE_MANAGER_SECRET the_secret of", "LIGHTHOUSE_MANAGER_SECRET (removed) of"),
        ("PASSWORD=x", "PASSWORD=(removed)"),
        ("PASSWORD is what I need", "PASSWORD is what I need"),
        ("HF_TOKEN: hf_abc, next", "HF_TOKEN: (removed), next"),
        ("tokens=123456 loss=2.1 tokens_per_s: 9000", "tokens=123456 loss=2.1 tokens_per_s: 9000"),
        ("the token is not one of this lighthouse's", "the token is not one of this lighthouse's"),
    ],
)
def test_credentials_are_removed_and_what_looks_like_them_is_kept(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_secrets_that_the_process_knows_are_removed_wherever_they_stand(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", "text", secrets=("5ec4e7" * 8, ""))
    logging.getLogger("x").info("a rank has printed %s, bare", "5ec4e7" * 8)
    assert last_line(capsys).endswith("I x: a rank has printed (removed), bare")
    assert without_credentials(f"key: {'5ec4e7' * 8};") == "key: (removed);"
    set_up_logging("info", "text")
    assert without_credentials("5ec4e7" * 8) == "5ec4e7" * 8
