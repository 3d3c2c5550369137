"""docs/reference/options.md says what the code does. REWRITE_DOCS=1 writes its tables anew."""

import os

import pytest

from tests.docs.pages import REFERENCE, sections, with_sections
from tests.docs.tables import tables

WANTED = tables()


def reference() -> str:
    if os.environ.get("REWRITE_DOCS"):
        REFERENCE.write_text(with_sections(REFERENCE.read_text(), WANTED))
    return REFERENCE.read_text()


@pytest.mark.parametrize("name", WANTED)
def test_a_table_is_that_of_the_code(name: str) -> None:
    assert sections(reference()).get(name) == WANTED[name], "REWRITE_DOCS=1 pytest tests/docs writes it anew"


def test_nothing_else_is_marked_as_generated() -> None:
    assert sections(reference()).keys() == WANTED.keys()
