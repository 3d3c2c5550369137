"""Each test that contributing/testing.md and reference/failures.md name as holding a promise exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import REPOSITORY, code_spans, table_rows
from tests.simulation.quorums.faults import KINDS

TESTS = REPOSITORY / "tests"


def named(page: Path) -> Iterator[str]:
    """Tests, classes of tests, and files, each without what a span says of its place or its parameters."""
    for span in code_spans(page):
        for part in re.sub(r"\[.*\]", "", span).split("::"):
            if re.fullmatch(r"test_\w+(\.\.\.)?|Test[A-Z]\w*|[\w/]+\.(py|txt)", part):
                yield part


def is_there(name: str, defined: set[str]) -> bool:
    if name.endswith((".py", ".txt")):
        return any(TESTS.rglob(name)) or (REPOSITORY / name).exists()
    if name.endswith("..."):
        return any(test.startswith(name[:-3]) for test in defined)
    return name in defined


def all_tests() -> set[str]:
    defined = {file.stem for file in TESTS.rglob("test_*.py")}
    for file in TESTS.rglob("test_*.py"):
        tree = ast.walk(ast.parse(file.read_text()))
        defined |= {
            node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
    return defined


def test_every_test_that_it_names_is_there() -> None:
    names, defined = set(named(REPOSITORY / "docs/contributing/testing.md")), all_tests()
    assert len(names) > 100
    assert sorted(name for name in names if not is_there(name, defined)) == []


def test_every_failure_names_its_evidence() -> None:
    """Tests, files, and the simulator's kinds of fault."""
    failures = [row[0] for row in table_rows((REPOSITORY / "docs/reference/failures.md").read_text(), 5)]
    promises = table_rows((REPOSITORY / "docs/contributing/testing.md").read_text(), 2)
    evidence = {row[0]: re.findall("`([^`]+)`", row[1]) for row in promises}
    defined = all_tests() | KINDS.keys()
    assert len(failures) > 30
    assert [what for what in failures if not evidence.get(what)] == []
    assert sorted(name for what in failures for name in evidence[what] if not is_there(name, defined)) == []
