"""The Markdown pages, and what stands in them as code."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "docs/reference"

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def pages() -> list[Path]:
    top = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    return [*(REPOSITORY / name for name in top), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return _FENCE.sub("", page.read_text())


def command_lines(page: Path) -> Iterator[str]:
    """The lines of indented blocks: what a reader types."""
    yield from _INDENTED.findall(prose(page))


def code_spans(page: Path) -> Iterator[str]:
    yield from _SPAN.findall(prose(page))


def table_rows(text: str, columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {at - 1 for at, row in enumerate(rows) if set(row) == {"---"}}
    return [row for at, row in enumerate(rows) if len(row) == columns and at not in heads and set(row) != {"---"}]


def sections(text: str) -> dict[str, str]:
    """The generated parts of a page by their name."""
    return dict(re.findall(r"<!-- begin (.+?) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def with_sections(text: str, parts: dict[str, str]) -> str:
    """`text` with every generated part replaced by that of `parts`."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- begin {match[1]} -->\n{parts[match[1]]}<!-- end -->"

    return re.sub(r"<!-- begin (.+?) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)
