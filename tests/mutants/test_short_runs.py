"""What brings a mutant out in the simulator is said of each, in words that the simulator knows."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import pytest

from lighthouse.job.records import QuorumConfig
from tests.mutants.catalogue import load
from tests.mutants.short_runs import Aim, find_aim, load_aims, main
from tests.simulation.faults import KINDS
from tests.simulation.plan import SCENARIOS, Plan

AIMS, OUT_OF_REACH = load_aims()


@pytest.fixture(autouse=True)
def logs_again() -> Iterator[None]:
    """main() silences the process that it is called in."""
    yield
    logging.disable(logging.NOTSET)


def test_each_mutant_has_one_aim_or_a_reason_why_no_run_finds_it():
    placed = Counter(name for row in (*AIMS, *OUT_OF_REACH) for name in row.mutants)
    assert {mutant.name: 1 for mutant in load()} == placed


@pytest.mark.parametrize("aim", AIMS, ids=lambda aim: aim.mutants[0])
def test_an_aim_is_of_what_a_run_is_drawn_from(aim: Aim):
    assert set(aim.faults) <= KINDS.keys()
    assert set(aim.scenarios) <= SCENARIOS.keys()
    assert aim.plan.keys() <= {field.name for field in fields(Plan)}
    assert aim.config.keys() <= {field.name for field in fields(QuorumConfig)}


def test_a_run_is_drawn_from_its_number_alone():
    aim = AIMS[0]
    assert aim.draw(6) == aim.draw(6) != aim.draw(8)
    assert set(aim.draw(6).mix) <= set(aim.faults)


def test_the_code_as_it_is_is_clean(capsys: pytest.CaptureFixture[str]):
    assert main([AIMS[0].mutants[0], "0:2"]) == 0
    assert capsys.readouterr().out == ""


def test_what_no_run_finds_has_no_aim():
    assert find_aim(OUT_OF_REACH[0].mutants[0]) is None
