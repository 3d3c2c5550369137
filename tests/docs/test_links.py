"""What the pages point to is there."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, pages, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)|<(https?://[^>\s]+)>")


def targets(page: Path) -> list[str]:
    return [inline or bare for inline, bare in _LINK.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    missing: list[str] = []
    for target in targets(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(target)
    assert missing == []


def test_pages_that_the_product_names_are_there() -> None:
    """In messages and docstrings."""
    named = {
        name
        for package in ("agent_client", "lighthouse", "manager", "lighthouse_runtime", "lighthouse_protocol")
        for module in (REPOSITORY / package).rglob("*.py")
        for name in re.findall(r"docs/[\w/-]+\.md", module.read_text())
    }
    assert named
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []


def test_readme_shows_the_picture() -> None:
    assert "docs/parts.svg" in targets(pages()[0])


def test_the_changelog_begins_with_what_is_unreleased_and_dates_all_else() -> None:
    first, *released = re.findall(r"^## (.*)$", prose(REPOSITORY / "CHANGELOG.md"), re.MULTILINE)
    assert first == "[Unreleased]"
    assert [each for each in released if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each)] == []
