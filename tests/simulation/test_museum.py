"""Each checker bites: a planted defect is found by the checker that it is for, and by nothing else without it."""

import pytest

from tests.simulation.museum.catalogue import EXHIBITS
from tests.simulation.museum.exhibit import Exhibit

pytestmark = pytest.mark.timeout(600)

RULES = {f"S{number}" for number in (*range(1, 10), 11, 12, 13, 14)}

each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)


@each
def test_a_planted_defect_is_found_by_its_checker(exhibit: Exhibit):
    with exhibit.planted():
        assert any(exhibit.is_found(seed) for seed in exhibit.shown_by)


@pytest.mark.slow
@each
def test_without_it_the_same_seeds_are_clean(exhibit: Exhibit):
    assert [exhibit.run(seed).violation for seed in exhibit.shown_by] == [""] * len(exhibit.shown_by)


def test_every_checker_bites():
    assert {exhibit.rule for exhibit in EXHIBITS} == RULES
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS) >= 12
