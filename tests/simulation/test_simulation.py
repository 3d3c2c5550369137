"""Drawn runs of both simulators are clean and send what was frozen. See docs/contributing/simulation.md."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context

import pytest

from tests.simulation import frozen
from tests.simulation.quorums.faults import KINDS
from tests.simulation.quorums.plan import SCENARIOS, draw_plan
from tests.simulation.quorums.simulation import QuorumSimulation
from tests.simulation.simulators import SIMULATORS, run_guarded, run_seed
from tests.simulation.world import Died, Result, Violation

# A minute of computing, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)

SAMPLE = {"quorums": range(30), "runs": range(70)}
STORE_SEEDS = range(20)  # of a scenario that no seed draws
TIGHT_SEEDS = {"quorums": range(10), "runs": range(20)}  # of the other one
MORE_TIGHT_SEEDS = {"quorums": range(10, 150), "runs": range(20, 400)}
NEVER_DRAWN = {"two_lighthouses", "tight"}
LONG = {"seconds": 750.0, "groups": 10, "min_step_s": 0.25}  # 600 s of faults
LONG_SEEDS = range(12)
PARTS = 10
OF_TWO_LIGHTHOUSES = {kind.name for kind in KINDS.values() if kind.place == "two_lighthouses"}
DRAWN = {"quorums": KINDS.keys() - OF_TWO_LIGHTHOUSES, "runs": SIMULATORS["runs"].faults.keys()}

each_simulator = pytest.mark.parametrize("name", SIMULATORS)


def failed(results: Iterable[Result]) -> list[str]:
    return [f"seed {result.seed}: {result.violation}" for result in results if result.violation]


def in_parallel(act: "partial[Result] | partial[frozen.Recorded]", seeds: Iterable[int]) -> list:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(act, seeds, chunksize=4))


def check(name: str, recorded: list[frozen.Recorded]) -> Counter[str]:
    """Check that runs are clean and send what was frozen. Return the sums of their counts."""
    results = [each.result for each in recorded]
    assert failed(results) == []
    expected = frozen.load(name)
    assert [each.result.seed for each in recorded if each.digest != expected[each.result.seed]] == []
    return sum((result.counts for result in results), Counter[str]())


def missing(name: str, counts: Counter[str]) -> list[str]:
    """Return the kinds of faults that did not strike."""
    return [kind for kind in DRAWN[name] if not counts[f"fault: {kind}"]]


def test_drawn_quorums_are_clean_and_send_what_was_frozen():
    counts = check("quorums", [frozen.record("quorums", seed) for seed in SAMPLE["quorums"]])
    drawn = Counter(fault.what for seed in SAMPLE["quorums"] for fault in QuorumSimulation(draw_plan(seed)).faults)
    assert {name: counts[f"fault: {name}"] for name in KINDS} == {name: drawn[name] for name in KINDS}
    assert len(drawn) > 30
    assert counts["quorums"] > 5 * len(SAMPLE["quorums"])
    assert counts["commits"] > 100 * len(SAMPLE["quorums"])


def test_drawn_runs_are_clean_and_send_what_was_frozen():
    counts = check("runs", [frozen.record("runs", seed) for seed in SAMPLE["runs"]])
    assert missing("runs", counts) == []
    assert counts["generations"] > 3 * len(SAMPLE["runs"])
    assert counts["completions"] > len(SAMPLE["runs"]) / 3
    assert counts["stops"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
@each_simulator
def test_frozen_seeds_are_clean_and_send_what_was_frozen(name: str):
    """One seed in PARTS, others every day. `python -m tests.simulation --compare` checks all."""
    first = datetime.now(UTC).toordinal() % PARTS
    check(name, in_parallel(partial(frozen.record, name), range(first, len(frozen.load(name)), PARTS)))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("quorums", 90693, id="the lighthouse pauses for longer than the join timeout"),
        pytest.param("quorums", 91113, id="a newcomer trains alone while its quorum's only other member is paused"),
        pytest.param("runs", 860, id="a rank of a completed run reconnects before the next launch"),
        pytest.param("runs", 917, id="the lighthouse restarts between a completed run and the next launch"),
    ],
)
def test_checkers_accept_correct_behavior(name: str, seed: int):
    assert run_seed(name, seed).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_is_clean(scenario: str):
    assert failed(run_seed("quorums", seed, scenario=scenario) for seed in range(8)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_lighthouses_are_clean():
    results: list[Result] = in_parallel(partial(run_guarded, "quorums", scenario="two_lighthouses"), STORE_SEEDS)
    assert failed(results) == []
    counts = sum((result.counts for result in results), Counter[str]())
    assert [kind for kind in OF_TWO_LIGHTHOUSES if not counts[f"fault: {kind}"]] == []


@each_simulator
def test_tight_runs_are_clean(name: str):
    results = [run_guarded(name, seed, scenario="tight") for seed in TIGHT_SEEDS[name]]
    assert failed(results) == []
    assert sum(1 for r in results for kind, n in r.counts.items() if n and kind.startswith("fault: ")) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_simulator
def test_more_tight_runs_are_clean(name: str):
    assert failed(in_parallel(partial(run_guarded, name, scenario="tight"), MORE_TIGHT_SEEDS[name])) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_groups_for_ten_minutes_are_clean():
    assert failed(in_parallel(partial(run_guarded, "quorums", **LONG), LONG_SEEDS)) == []


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param("runs", "ends"),
        *[
            pytest.param("quorums", scenario, marks=[] if scenario == "storm" else pytest.mark.slow)
            for scenario in SCENARIOS
        ],
    ],
)
def test_a_seed_is_the_same_run_again_in_another_process(name: str, scenario: str):
    """No order may come from a set, so the hashes of texts do not matter."""
    command = [sys.executable, "-m", "tests.simulation", name, "--seed", "5", "--scenario", scenario, "--trace"]
    traces = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    ]
    assert traces[0] == traces[1]
    assert traces[0].count(b"\n") > 20


@each_simulator
def test_plans_are_drawn_from_the_seed_alone(name: str):
    draw = SIMULATORS[name].draw_plan
    assert draw(3) == draw(3) != draw(4)
    scenarios = set(SIMULATORS[name].scenarios) - NEVER_DRAWN
    assert {draw(seed).scenario for seed in range(300)} == scenarios


# -- how a run of quorums fails


def test_a_fault_that_cannot_fire_fails_the_run():
    simulation = QuorumSimulation(replace(draw_plan(1), faults_s=10.0, step_s=2.0, mix=("fail_step",)))
    simulation.kinds["fail_step"] = replace(KINDS["fail_step"], fire=lambda simulation, fault: False)
    with pytest.raises(Violation, match="faults that did not fire"):
        simulation.run()


def test_faults_that_do_not_end_fail_the_run():
    simulation = QuorumSimulation(replace(draw_plan(1), faults_s=5.0, step_s=2.0))
    simulation.begin()
    with pytest.raises(Violation, match="1 faults last beyond 605 s"):
        simulation.run()


def test_the_death_of_a_process_by_a_fault_does_not_end_the_fault(monkeypatch: pytest.MonkeyPatch):
    """An example is a manager that dies with its next answer, which it gives because a watch breaks."""
    simulation = QuorumSimulation(replace(draw_plan(1), faults_s=10.0, mix=("kill_lighthouse",)))

    def dies(*_: object) -> None:
        raise Died

    monkeypatch.setattr(simulation.lighthouse, "kill", dies)
    simulation.run()
    assert simulation.pending == 0
    assert simulation.world.counts["fault: kill_lighthouse"] == len(simulation.faults) > 0


def test_a_quorum_that_is_not_replaced_fails_the_run():
    simulation = QuorumSimulation(draw_plan(1))
    simulation.run()
    simulation.promise.hit |= set(range(simulation.world.counts["quorums"]))
    with pytest.raises(Violation, match="too few quorums"):
        simulation.promise.at_end()
