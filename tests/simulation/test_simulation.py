"""The suite under drawn faults, on a virtual clock: S1 to S9, S11 to S13. simulation.md: how to read a failure."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import pytest

from tests.simulation.quorums.faults import KINDS
from tests.simulation.quorums.plan import SCENARIO_WEIGHTS, SCENARIOS, draw_plan
from tests.simulation.quorums.simulation import Simulation, run_plan, run_seed
from tests.simulation.world import Died, Result, Violation

# A minute of computing, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)

SEEDS = range(16)
MORE_SEEDS = range(16, 160)
STORE_SEEDS = range(20)  # of the scenario that is not drawn by itself
LONG = {"seconds": 750.0, "groups": 10, "min_step_s": 0.25}  # 600 s of faults
LONG_SEEDS = range(30)


def failed(results: Iterable[Result]) -> list[str]:
    return [f"seed {result.seed}: {result.violation}" for result in results if result.violation]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [run_seed(seed) for seed in SEEDS]


def test_drawn_runs_are_clean(results: list[Result]):
    assert failed(results) == []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(90693, id="the lighthouse stands still for longer than a straggler is waited for"),
        pytest.param(91113, id="a newcomer trains alone while its quorum's only other member is paused"),
    ],
)
def test_nothing_is_held_against_those_that_could_not_help_it(seed: int):
    assert run_seed(seed).violation == ""


def test_drawn_runs_have_the_faults_of_their_plans_and_many_quorums(results: list[Result]):
    counts = sum((result.counts for result in results), Counter[str]())
    drawn = Counter(fault.what for seed in SEEDS for fault in Simulation(draw_plan(seed)).faults)
    assert {name: counts[f"fault: {name}"] for name in KINDS} == {name: drawn[name] for name in KINDS}
    assert len(drawn) > 30
    assert counts["quorums"] > 5 * len(results)
    assert counts["commits"] > 100 * len(results)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_is_clean(scenario: str):
    assert failed(run_seed(seed, scenario=scenario) for seed in range(8)) == []


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=[] if name == "storm" else pytest.mark.slow) for name in SCENARIOS]
)
def test_a_seed_is_the_same_run_again_in_another_process(scenario: str):
    """Also where the hashes of texts are others: no order may come from a set."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "5", "--scenario", scenario, "--trace"]
    traces = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    ]
    assert traces[0] == traces[1]
    assert traces[0].count(b"\n") > 20


def test_a_fault_that_cannot_fire_fails_the_run():
    simulation = Simulation(replace(draw_plan(1), faults_s=10.0, step_s=2.0, mix=("fail_step",)))
    simulation.kinds["fail_step"] = replace(KINDS["fail_step"], fire=lambda simulation, fault: False)
    with pytest.raises(Violation, match="faults that did not fire"):
        simulation.run()


def test_faults_that_do_not_end_fail_the_run():
    simulation = Simulation(replace(draw_plan(1), faults_s=5.0, step_s=2.0))
    simulation.begin()
    with pytest.raises(Violation, match="1 faults last beyond 605 s"):
        simulation.run()


def test_a_process_that_dies_of_a_fault_at_once_ends_the_fault_alone(monkeypatch: pytest.MonkeyPatch):
    """As a manager that was to die with its next answer, and gives one because a watch breaks."""
    simulation = Simulation(replace(draw_plan(1), faults_s=10.0, mix=("kill_lighthouse",)))

    def dies(*_: object) -> None:
        raise Died

    monkeypatch.setattr(simulation.lighthouse, "kill", dies)
    simulation.run()
    assert simulation.pending == 0
    assert simulation.world.counts["fault: kill_lighthouse"] == len(simulation.faults) > 0


def test_a_quorum_that_is_not_replaced_fails_the_run():
    simulation = Simulation(draw_plan(1))
    simulation.run()
    simulation.promise.hit |= set(range(simulation.world.counts["quorums"]))
    with pytest.raises(Violation, match="too few quorums"):
        simulation.promise.at_end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_drawn_runs_are_clean():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run_seed, MORE_SEEDS, chunksize=4))
        results += pool.map(partial(run_seed, scenario="two_lighthouses"), STORE_SEEDS, chunksize=4)
    assert failed(results) == []
    counts = sum((result.counts for result in results), Counter[str]())
    assert [name for name in KINDS if not counts[f"fault: {name}"]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_groups_for_ten_minutes_are_clean():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert failed(pool.map(partial(run_seed, **LONG), LONG_SEEDS, chunksize=2)) == []


def test_plans_are_drawn_from_the_seed_alone():
    assert draw_plan(3) == draw_plan(3) != draw_plan(4)
    drawn = {name for name, weight in zip(SCENARIOS, SCENARIO_WEIGHTS, strict=True) if weight}
    assert {draw_plan(seed).scenario for seed in range(300)} == drawn
    assert run_plan(draw_plan(3)).counts == run_seed(3).counts
