"""Runs tests/scenarios/*.txt: lines to a lighthouse, ---- and what it says.

REWRITE_SCENARIOS=1 python -m pytest tests/scenarios writes what it says now into the files; then read the diff.
"""

import difflib
import os
from pathlib import Path

import pytest

from tests.scenarios.script import Script

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def played(text: str) -> str:
    """`text` with what is said in place of what was expected."""
    script = Script()
    paragraphs: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        told = paragraph.partition("\n----")[0]
        lines = [line for line in told.splitlines() if line and not line.startswith("#")]
        said = [answer for line in lines for answer in script.tell(line)]
        if lines and not lines[-1].startswith(("status", "lighthouse")) and not any(" quorum " in s for s in said[-1:]):
            said.append(script.verdict())
        paragraphs.append("\n".join([told, *(["----", *said] if said else [])]))
    return "\n\n".join(paragraphs) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path):
    expected = path.read_text()
    actual = played(expected)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(actual)
    elif actual != expected:
        diff = difflib.unified_diff(expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="")
        pytest.fail("\n".join([f"{path.name}:", *diff]), pytrace=False)


def test_there_are_scenarios():
    assert len(FILES) >= 12


def test_a_wrong_expectation_is_noticed():
    text = FILES[0].read_text()
    assert played(text.replace("quorum 1:", "quorum 7:")) == text
    assert "quorum 1:" in text
