"""A reader who types what the tutorials show sees what the tutorials show."""

import difflib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.console import Mismatch, Reader, isolated, steps
from tests.docs.pages import REPOSITORY
from tests.docs.tables import PROGRAMS
from tests.docs.test_commands import command_of
from tests.processes import ROOT

TUTORIALS = sorted((REPOSITORY / "docs/tutorials").glob("*.md"))
YOUR_SCRIPT = REPOSITORY / "examples/your_script"
MOST_WORDS = 1200


def names(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", TUTORIALS, ids=names)
def test_a_tutorial_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", TUTORIALS, ids=names)
def test_every_command_is_accepted(page: Path) -> None:
    commands = [step.command for step in steps(page.read_text()) if step.command]
    ours = [words for line in commands if (words := shlex.split(line.replace("\\\n", " ")))[0] in PROGRAMS]
    assert ours
    for words in ours:
        command, rest = command_of(words)
        command.make_context(" ".join(words[:2]), rest, **next(iter(PROGRAMS.values())).context_settings)


def test_the_page_shows_every_line_that_differs() -> None:
    before, after = ((YOUR_SCRIPT / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    page = (REPOSITORY / "docs/tutorials/your-own-script.md").read_text()
    shown = [line for line in "".join(page.split("```diff\n")[1:]).splitlines() if line[:1] in ("+", "-")]
    assert shown == changes
