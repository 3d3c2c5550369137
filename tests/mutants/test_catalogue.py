"""The list of mutants fits the source as it is."""

from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Mutant, load

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant):
    for module, source in mutant.sources().items():
        compile(source, module, "exec")


def test_names_are_unique():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_their_tests_exist():
    words = [word for mutant in MUTANTS for tests in mutant.tests for word in tests.split()]
    paths = {word.split("::")[0] for word in words if word.startswith("tests/")}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_there_are_enough():
    assert len(MUTANTS) >= 500
