"""docs/concepts/comparison.md has no figure of its own: each is one of the table that its row links to."""

import re

import pytest

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs/concepts/comparison.md").read_text()
BENCHMARKS = (REPOSITORY / "benchmarks" / "README.md").read_text()
ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \| (.+?) \| \[.+?\]\(\.\./\.\./benchmarks/README\.md#(.+?)\) \|$", PAGE, re.MULTILINE
)


def section(anchor: str) -> str:
    """The part of the benchmarks under a heading."""
    parts = re.split(r"^## ", BENCHMARKS, flags=re.MULTILINE)[1:]
    [found] = [part for part in parts if part.partition("\n")[0].lower().replace(" ", "-") == anchor]
    return found


def test_rows_are_found() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_figure_stands_in_the_table_that_its_row_links_to(row: tuple[str, str, str, str]) -> None:
    _, ours, theirs, anchor = row
    measured = set(re.findall(r"\d+(?:\.\d+)?", section(anchor)))
    said = re.findall(r"\d+(?:\.\d+)?", ours + " " + re.sub(r"timeout of \d+ s", "", theirs))
    assert said, row
    assert [figure for figure in said if figure not in measured] == []
