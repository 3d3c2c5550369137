"""The audit: a line for each act, bounded in size and rate, on one line whatever others write."""

import json
import logging
import math
import stat
from pathlib import Path

import pytest

from lighthouse_protocol.rules.access import NOBODY, Principal, Role
from lighthouse_runtime.security.access import GENERATIONS, REFUSALS_AT_ONCE, Audit

OPERATOR = Principal("operate-1", frozenset({Role.OPERATE}))


def entries(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_act_is_a_line_in_the_log_and_in_a_private_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "audit.jsonl"
    Audit(path).act(OPERATOR, "10.0.0.1:9", "Kill", "replica_id=a, msg=x\n2026 I all is well")
    [entry] = entries(path)
    told = [entry[name] for name in ("role", "credential", "what", "result")]
    assert told == ["operate", "operate-1", "Kill", "done"]
    assert "\n" not in entry["target"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "audit: Kill replica_id=a, msg=x 2026 I all is well by operate-1 (role operate) at 10.0.0.1:9: done"


def test_refusals_cannot_fill_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    for _ in range(1000):
        audit.refuse(NOBODY, "there", "Kill", "no credential")
    assert len(entries(path.with_name("audit.refused.jsonl"))) <= REFUSALS_AT_ONCE + 5


def test_no_number_of_refusals_removes_an_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lighthouse_runtime.security.access.MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("lighthouse_runtime.security.access.REFUSALS_AT_ONCE", math.inf)
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    audit.act(OPERATOR, "here", "Kill", "b")
    for _ in range(100):
        audit.refuse(NOBODY, "there", "StopAsked", "no part")
    assert [entry["target"] for entry in entries(path)] == ["b"]
    assert len(list(tmp_path.iterdir())) <= 2 + GENERATIONS


def test_it_is_bounded_and_as_many_older_files_are_kept_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lighthouse_runtime.security.access.MAX_FILE_BYTES", 1000)
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    for number in range(200):
        audit.act(OPERATOR, "here", "Kill", str(number))
    older = [path.with_name(f"audit.jsonl.{number}") for number in range(GENERATIONS, 0, -1)]
    assert sorted(tmp_path.iterdir()) == sorted([path, *older])
    kept = [int(entry["target"]) for file in (*older, path) for entry in entries(file)]
    assert kept == list(range(kept[0], 200)), "in order, and none is torn or missing"
    assert path.stat().st_size < 1500


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(tmp_path / "missing" / "audit.jsonl")
    for _ in range(3):
        audit.act(OPERATOR, "here", "Kill", "a")
    assert len([record for record in caplog.records if "cannot write the audit log" in record.getMessage()]) == 1
