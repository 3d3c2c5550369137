"""docs/testing.md says which test holds a promise: each name in it is one of a test that there is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import REPOSITORY, code_spans

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


def test_every_test_that_it_names_is_there() -> None:
    defined = {file.stem for file in TESTS.rglob("test_*.py")}
    for file in TESTS.rglob("test_*.py"):
        tree = ast.walk(ast.parse(file.read_text()))
        defined |= {
            node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
    names = set(named(REPOSITORY / "docs" / "testing.md"))
    assert len(names) > 100
    assert sorted(name for name in names if not is_there(name, defined)) == []
