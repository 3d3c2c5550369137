"""The list of mutants fits the source as it is."""

from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Mutant, load

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant):
    planted = mutant.plant((ROOT / mutant.module).read_text())
    compile(planted, mutant.module, "exec")


def test_names_are_unique():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_their_tests_exist():
    paths = {path.split("::")[0] for mutant in MUTANTS for tests in mutant.tests for path in tests.split()}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_there_are_enough():
    assert len(MUTANTS) >= 150
