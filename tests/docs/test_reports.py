"""Each row of docs/reference/reports.md names a report of another project and a test that exists."""

import re

import pytest

from tests.docs.pages import REPOSITORY

PAGE = REPOSITORY / "docs/reference/reports.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]


def test_there_are_rows() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.findall(r"`(test_\w+)`", row)[-1])
def test_a_row_has_reports_and_a_test_that_exists(row: str) -> None:
    reports, _, _, test = row[2:-2].split(" | ")
    for report in reports.split(", "):
        assert re.fullmatch(r"\[[\w ]+ #(\d+)\]\(https://github\.com/[\w-]+/[\w-]+/issues/\1\)", report), report
    [(name, path)] = re.findall(r"^\[`(test_\w+)`\]\((.+)\)$", test)
    assert f"def {name}(" in (PAGE.parent / path).resolve().read_text()
