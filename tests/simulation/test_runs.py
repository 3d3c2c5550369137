"""Runs under drawn faults, on a virtual clock: G1 to G13 hold. simulation.md says how to read a failure."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from tests.simulation.__main__ import guarded
from tests.simulation.runs.faults import FAULTS
from tests.simulation.runs.museum import EXHIBITS, Exhibit
from tests.simulation.runs.plan import SCENARIOS, draw_plan
from tests.simulation.runs.simulation import run_seed
from tests.simulation.world import Result

pytestmark = pytest.mark.timeout(600)

SEEDS = range(30)
LONG_SEEDS = range(1000, 1200)
RULES = {f"G{number}" for number in range(1, 14)}

each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)


def failed(results: Iterable[Result]) -> list[str]:
    return [f"seed {result.seed}: {result.violation}" for result in results if result.violation]


def test_drawn_runs_are_clean():
    results = [run_seed(seed) for seed in SEEDS]
    assert failed(results) == []
    counts = sum((result.counts for result in results), Counter[str]())
    assert [fault for fault in FAULTS if not counts[f"fault: {fault}"]] == []
    assert counts["generations"] > 3 * len(results)
    assert counts["completions"] > len(results) / 3
    assert counts["stops"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_of_drawn_runs_are_clean():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert failed(pool.map(partial(guarded, run_seed), LONG_SEEDS, chunksize=50)) == []


def test_a_seed_is_the_same_run_again_in_another_process():
    """Also where the hashes of texts are others: no order may come from a set."""
    command = [sys.executable, "-m", "tests.simulation.runs", "--seed", "5", "--scenario", "ends", "--trace"]
    traces = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    ]
    assert traces[0] == traces[1]
    assert traces[0].count(b"\n") > 20


def test_plans_are_drawn_from_the_seed_alone():
    assert draw_plan(3) == draw_plan(3) != draw_plan(4)
    assert {draw_plan(seed).scenario for seed in range(100)} == set(SCENARIOS)


@each
def test_a_planted_defect_is_found_by_its_checker(exhibit: Exhibit):
    """And its seed is clean without it."""
    with exhibit.planted():
        found = next((seed for seed in exhibit.shown_by if exhibit.is_found(seed)), None)
    assert found is not None
    assert exhibit.run(found).violation == ""


def test_every_checker_bites():
    assert {exhibit.rule for exhibit in EXHIBITS} == RULES
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS) >= 12
