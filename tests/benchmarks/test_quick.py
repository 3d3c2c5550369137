"""Each benchmark runs, and its numbers can be. What they are is for a quiet machine to say."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.heal_links import is_possible
from tests.docs.pages import REPOSITORY

TIMEOUT_S = 600

pytestmark = pytest.mark.slow

Ran = Callable[..., dict[str, Any]]


@pytest.fixture
def ran(tmp_path: Path) -> Ran:
    """What `python -m benchmarks.NAME --quick` writes, with more options where they are given."""

    def run(name: str, *options: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path), *options]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n| ") > 2, done.stdout
        return json.loads(path.read_text())

    return run


def test_quorum_round(ran: Ran) -> None:
    (size,) = ran("quorum_round")["sizes"]
    assert all(0 < server["cpu_s"]["median"] < 5 for server in size["servers"])


def test_step_overhead(ran: Ran) -> None:
    *_, standing = ran("step_overhead")["contenders"]
    assert 0 < standing["calls"]["both_s"]["median_s"] < 1
    assert 1 <= standing["round_trips"] < 2


def test_stragglers(ran: Ran) -> None:
    equal, by_speed = ran("stragglers")["results"]
    assert by_speed["step_s"] < equal["step_s"]


def test_torchrun(ran: Ran) -> None:
    (loss,) = ran("torchrun")["losses"]
    assert 0 < loss["recovered_s"] < 60


def test_recovery(ran: Ran) -> None:
    results = ran("recovery")["results"]
    assert [row["fault"] for row in results] == ["kill-group", "kill-rank"]
    for run in (run for row in results for run in row["runs"]):
        assert 0 < run["noticed_s"] <= run["quorum_s"] <= run["committed_s"] < 60


def test_keepers(ran: Ran) -> None:
    report = ran("keepers")
    for every in (1, 16):
        of_kills = report[f"keep_every_{every}"]
        assert all(0 <= killed["lost"] <= every for killed in of_kills["kills"])
        assert of_kills["different_steps"] == 0
    assert len(report["cost"]["kept_s"]) == len(report["cost"]["without_s"]) == 2


def test_catch_up(ran: Ran) -> None:
    (healed,) = ran("catch_up")["results"]
    assert 0 < healed["median_s"] <= healed["longest_s"] < 60
    assert healed["behind"] >= 1


def test_outage(ran: Ran) -> None:
    (result,) = ran("outage")["results"]
    (run,) = result["runs"]
    assert 0 < run["away_s"] < run["standing_s"]
    assert 0.02 < run["median_step_s"] <= run["longest_step_s"]


def test_scale(ran: Ran) -> None:
    stages = ran("scale")["stages"]
    assert stages[-1]["told"]["steps_s"]
    assert all(0 < stage["cpu_s"] < 10 * stage["wall_s"] for stage in stages)
    assert all(20 < stage["memory_mb"] < 300 for stage in stages)
    first, *_, last = [max(stage["told"]["quorums"]) for stage in stages]
    assert first < last


def test_scale_with_tls(ran: Ran) -> None:
    report = ran("scale", "--tls")
    plain, by_tls = report["stages"], report["stages_with_tls"]
    assert [stage["name"] for stage in plain] == [stage["name"] for stage in by_tls]
    assert all(stage["told"]["commits"] for stage in by_tls if stage["told"]["steps_s"])


def test_heal(ran: Ran) -> None:
    results = {row["kind"]: row for row in ran("heal")["results"]}
    assert {"snapshot", "hold"} <= results.keys()
    for row in results.values():
        assert row["seconds_per_gib"]["median"] > 0
        assert 0.9 < row["target_extra"]["median"] < 1.2
    assert results["hold"]["source_extra"]["median"] < 0.25
    assert 0.9 < results["snapshot"]["source_extra"]["median"] < 1.05


def test_heal_links(ran: Ran) -> None:
    if not is_possible():
        pytest.skip("takes the right to administer the network")
    one, three = ran("heal_links")["results"]
    assert (one["sources"], three["sources"]) == (1, 3)
    assert 0 < three["seconds"][0] < one["seconds"][0] < 60
    assert three["killed_s"] > 0


def test_report(ran: Ran) -> None:
    (result,) = ran("report")["results"]
    assert result["faults_found"] == result["faults"]
    assert result["sum_s"] == pytest.approx(result["expected_s"], rel=0.01)


def test_restart(ran: Ran) -> None:
    restarts = ran("restart")["restarts"]
    assert len(restarts) == 2
    assert all(0 < restart["from_start_s"] < restart["whole_s"] for restart in restarts)
