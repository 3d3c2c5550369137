"""The ledger's files: a day each, read in pages, bounded."""

import logging

import pytest

from lighthouse.store import ledger_files
from lighthouse.store.ledger_files import LedgerFiles
from lighthouse_protocol.refusals import InvalidRequest

DAY_S = 86_400.0
T = 1_700_000_000.0


def read_all(files: LedgerFiles, page: str = "") -> list[str]:
    found, page = files.read(page)
    lines = list(found)
    while page:
        found, page = files.read(page)
        lines += found
    return lines


def test_days_are_read_in_order_and_from_a_day_on(tmp_path):
    files = LedgerFiles(tmp_path / "i")
    assert read_all(files) == []
    for day in range(3):
        files.append([f"a{day}", f"b{day}"], T + day * DAY_S)
        files.append([], T + 9 * DAY_S)
    assert files.days() == ["20231114", "20231115", "20231116"]
    assert read_all(files) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert read_all(LedgerFiles(files.folder), "20231115") == ["a1", "b1", "a2", "b2"]
    assert read_all(files, "20250101") == []
    assert (files.folder / "ledger-20231114.jsonl").stat().st_mode & 0o777 == 0o600


def test_other_files_in_the_folder_are_no_days(tmp_path):
    files = LedgerFiles(tmp_path)
    files.append(["a"], T)
    (tmp_path / "ledger-20231114.jsonl.gz").write_bytes(b"x")
    (tmp_path / "ledger-previous.jsonl").write_text("b\n")
    assert read_all(files) == ["a"]


def test_a_page_ends_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_files, "PAGE_BYTES", 10)
    files, lines = LedgerFiles(tmp_path), [f"{i:06}" for i in range(9)]
    files.append(lines, T)
    first, following = files.read("")
    assert (first, following) == (lines[:2], "20231114:14")
    assert read_all(files) == lines


def test_a_line_cut_off_by_a_crash_spoils_no_other(tmp_path):
    files = LedgerFiles(tmp_path)
    files.append(["first"], T)
    path = tmp_path / "ledger-20231114.jsonl"
    path.write_bytes(path.read_bytes() + b'{"job":')
    files.append(["second"], T)
    assert read_all(files) == ["first", '{"job":', "second"]


def test_the_oldest_days_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_files, "MAX_FOLDER_BYTES", 25)
    files = LedgerFiles(tmp_path)
    for day in range(4):
        files.append(["x" * 9], T + day * DAY_S)
    assert files.days() == ["20231116", "20231117"]
    files.append(["x" * 99], T + 4 * DAY_S)
    assert files.days() == ["20231118"]  # the newest stays


def test_no_more_days_are_dropped_than_must_be(tmp_path, monkeypatch):
    files = LedgerFiles(tmp_path)
    for day in range(4):
        files.append(["x" * 9], T + day * DAY_S)
    monkeypatch.setattr(ledger_files, "MAX_FOLDER_BYTES", 25)
    files.append(["x"], T + 3 * DAY_S)
    assert files.days() == ["20231116", "20231117"]


@pytest.mark.parametrize("page", ["x", "2023", "20231114:", "20231114:x", "../../etc/passwd", "20231114:-1"])
def test_other_pages_are_refused(tmp_path, page):
    with pytest.raises(InvalidRequest, match="page"):
        LedgerFiles(tmp_path).read(page)


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    files = LedgerFiles(tmp_path / "file" / "folder")
    with caplog.at_level(logging.WARNING):
        files.append(["a"], T)
        files.append(["a"], T)
    assert [record.message.count("--incident-dir") for record in caplog.records] == [1]
