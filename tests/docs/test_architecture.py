"""docs/contributing/architecture.md has a line for each wing, in the wing's own words.

REWRITE_DOCS=1 rewrites its tables.
"""

import ast
import os
import re

import pytest

from tests.docs.pages import REPOSITORY, sections, with_sections

PAGE = REPOSITORY / "docs/contributing/architecture.md"
PACKAGES = ("lighthouse", "manager", "agent_client", "lighthouse_runtime", "lighthouse_protocol")


def _wings(package: str) -> str:
    lines = ["| wing | what lives there |\n", "| --- | --- |\n"]
    for door in sorted((REPOSITORY / package).glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(door.read_text())) or ""
        lines.append(f"| `{door.parent.name}/` | {' '.join(text.partition(chr(10) * 2)[0].split())} |\n")
    return "".join(lines)


WANTED = {package: _wings(package) for package in PACKAGES}


def page() -> str:
    if os.environ.get("REWRITE_DOCS"):
        PAGE.write_text(with_sections(PAGE.read_text(), WANTED))
    return PAGE.read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wing_has_its_line(package: str) -> None:
    assert sections(page()).get(package) == WANTED[package], "REWRITE_DOCS=1 pytest tests/docs writes it anew"


def test_every_folder_says_what_lives_there() -> None:
    doors = [door for package in PACKAGES for door in (REPOSITORY / package).rglob("__init__.py")]
    assert [str(door) for door in doors if not ast.get_docstring(ast.parse(door.read_text()))] == []


def test_every_file_that_is_named_exists() -> None:
    """A path may leave out the package of the one before it."""
    present = {
        path.relative_to(REPOSITORY).as_posix() for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")
    }
    named = {name for name in re.findall(r"`([\w/]+\.py)`", page()) if "/" in name}
    assert named
    assert [name for name in named if not any(path == name or path.endswith(f"/{name}") for path in present)] == []
