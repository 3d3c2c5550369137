"""What the runner makes of pytest's answers, and of outcomes that were kept."""

import dataclasses
from pathlib import Path

import pytest

from tests.mutants.__main__ import Outcome, first_failure, keep, read, table
from tests.mutants.catalogue import Change, Mutant

CHANGE = Change("a.py", "x = 1", "x = 2")
MUTANT = Mutant("late", "it is early", (CHANGE,), ("tests/test_a.py",))


def test_the_first_test_that_failed():
    output = (
        "1 failed\nFAILED tests/test_a.py::test_x[1-a] - assert 1 == 2\nFAILED tests/test_a.py::test_y - assert 0\n"
    )
    assert first_failure(output) == "tests/test_a.py::test_x[1-a]"
    assert first_failure("1 passed\n") == ""


@pytest.mark.parametrize(
    "reason", ["NameError: name 'y' is not defined", "ImportError: cannot import name 'y' from 'a'"]
)
def test_code_that_does_not_run_is_no_defect(reason: str):
    with pytest.raises(ValueError, match=reason.split(":")[0]):
        first_failure(f"FAILED tests/test_a.py::test_x - {reason}\n")


def test_the_newest_outcome_is_kept_while_the_mutant_is_the_same(tmp_path: Path):
    path = tmp_path / "results"
    keep(path, Outcome(MUTANT))
    keep(path, Outcome(MUTANT, found_by="tests/test_a.py::test_x"))
    assert read(path, [MUTANT])["late"].found_by == "tests/test_a.py::test_x"
    assert read(path, [dataclasses.replace(MUTANT, changes=(dataclasses.replace(CHANGE, new="x = 3"),))]) == {}


def test_the_table_names_what_was_not_found():
    found = Outcome(MUTANT, found_by="tests/test_a.py::test_x")
    other = dataclasses.replace(MUTANT, changes=(dataclasses.replace(CHANGE, module="b.py"),))
    rows = list(table([found, Outcome(MUTANT), Outcome(other, error="pytest ended with 2")]))[2:]
    assert rows == [
        "| `a.py` | 2 | 1 (50.0%) | late |",
        "| `b.py` | 1 | 0 (0.0%) | late (invalid) |",
        "| all | 3 | 1 (33.3%) | late, late (invalid) |",
    ]
