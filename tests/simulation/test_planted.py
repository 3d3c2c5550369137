"""The checkers find defects: each planted mutant by the checker of its rule, and nothing without the mutant."""

import pytest

from tests.mutants.catalogue import Mutant
from tests.simulation.planted import MUTANTS, finds, planted, run

pytestmark = pytest.mark.timeout(600)

RULES = {f"S{number}" for number in (*range(1, 10), 11, 12, 13, 14)} | {f"G{number}" for number in range(1, 14)}

each = pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)


@each
def test_a_checker_finds_a_planted_defect(mutant: Mutant):
    assert mutant.shown is not None
    with planted(mutant):
        assert any(finds(mutant, seed) for seed in range(*mutant.shown.seeds))


@pytest.mark.slow
@each
def test_the_seeds_are_clean_without_it(mutant: Mutant):
    assert mutant.shown is not None
    assert [violation for seed in range(*mutant.shown.seeds) if (violation := run(mutant, seed).violation)] == []


def test_every_checker_finds_a_defect():
    assert {mutant.shown.rule for mutant in MUTANTS.values() if mutant.shown is not None} == RULES
    assert len(MUTANTS) >= 70
