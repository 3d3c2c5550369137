"""README.md and docs/concepts/comparison.md show the table that `python -m benchmarks.table` writes."""

import re

from benchmarks.table import BEGIN, END, HEADER, IN_README, OPTIONS, ROWS
from tests.docs.pages import REPOSITORY

PAGES = {
    REPOSITORY / "README.md": ("benchmarks/README.md", IN_README),
    REPOSITORY / "docs/concepts/comparison.md": ("../../benchmarks/README.md", len(ROWS)),
}
SECTIONS = {
    re.sub(r"[^a-z0-9 ]", "", heading.lower()).replace(" ", "-")
    for heading in re.findall(r"^## (.+)$", (REPOSITORY / "benchmarks/README.md").read_text(), re.MULTILINE)
}


def test_each_page_has_the_rows_of_the_table() -> None:
    results = set()
    for page, (benchmarks_page, count) in PAGES.items():
        [measured] = re.findall(f"{BEGIN}(.*?){END}", page.read_text(), re.DOTALL)
        header, _, *rows = [line[2:-2].split(" | ") for line in measured.splitlines() if line.startswith("|")]
        assert [cell.strip() for cell in header] == list(HEADER)
        assert [[cells[0], *cells[3:]] for cells in rows] == [
            [row.what, f"[{row.benchmark}]({benchmarks_page}#{row.section})", f"`python -m benchmarks.{row.benchmark}`"]
            for row in ROWS[:count]
        ]
        assert re.search(
            r"Measured on [\d-]{10}, .* commit [0-9a-f]{10}\.|from the runs that the linked sections", measured
        )
        results.add(tuple(tuple(cells[1:3]) for cells in rows[:IN_README]))
    assert len(results) == 1, "README.md and comparison.md come from different runs"


def test_each_row_links_to_a_section_and_has_a_benchmark() -> None:
    benchmarks = {row.benchmark for row in ROWS}
    assert {row.section for row in ROWS} <= SECTIONS
    assert {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")} >= benchmarks >= set(OPTIONS)
