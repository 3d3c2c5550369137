"""Four groups of real processes: a slow rank is named with its stack, and none that waits or has restarted."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.agent_client.jobs import ask
from tests.agent_client.slow_actor import SlowActor
from tests.agent_client.training_jobs import MakeJob, TrainingJob
from tests.processes import Lighthouse, eventually, http_get

SLOW_AFTER_S = 8
NORMAL_S, SLOW_S = 0.05, 0.6  # of a microbatch; on a busy host, as much again
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "5s", "--slow-after", f"{SLOW_AFTER_S}s")

NAMES = ("a", "b", "c", "d")


def status(lighthouse: Lighthouse, job: TrainingJob) -> dict[str, Any]:
    return next(each for each in ask(lighthouse.address, "ranks")["jobs"] if each["job"] == job.name)


def slow_ranks(lighthouse: Lighthouse, job: TrainingJob) -> list[str]:
    return [rank["replica_id"] for rank in status(lighthouse, job)["ranks"] if rank["is_slow"]]


def incidents(lighthouse: Lighthouse, job: TrainingJob) -> list[dict[str, Any]]:
    return [each for each in ask(lighthouse.address, "incidents") if (each["job"], each["kind"]) == (job.name, "slow")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_rank_is_named_with_its_stack_until_it_recovers(
    make_job: MakeJob, lighthouse: Lighthouse, tmp_path: Path
) -> None:
    job = make_job(SlowActor, folder=tmp_path)
    groups = job.all_groups(*NAMES)
    for group in groups:
        job.build(group)
        group.ranks[0].call("set_microbatch", NORMAL_S)
    groups[2].ranks[0].call("set_microbatch", SLOW_S)
    job.train(*groups, pace_s=0.01)
    eventually(lambda: slow_ranks(lighthouse, job) == ["c"], "c is slow", within_s=120)
    [summary] = incidents(lighthouse, job)
    assert summary["suspects"] == ["c/0"]
    assert re.match(r"c/0 is slow: it computes for \S+ s per microbatch, its peers for \S+ s", summary["text"])
    found = {rank["replica_id"]: rank["compute_ratio_1m"] for rank in status(lighthouse, job)["ranks"]}
    assert found["c"] > 1.5
    assert max(found[name] for name in "abd") < 1.5, "they wait for c, and that is no work"

    def stacks() -> str:
        return "".join(each["stacks"] for each in ask(lighthouse.address, "incident", summary["id"])["evidence"])

    eventually(lambda: re.search(r'slow_actor\.py", line \d+ in crawl', stacks()), "its stack")
    scraped = http_get(lighthouse.http + "/metrics")[1]
    assert f'lighthouse_slow_ranks{{job="{job.name}"}} 1.0' in scraped
    assert re.search(rf'lighthouse_rank_compute_ratio_max{{job="{job.name}",window="1m"}} [1-9]', scraped)

    groups[2].ranks[0].call("set_microbatch", NORMAL_S)
    eventually(lambda: incidents(lighthouse, job)[0]["over_s"] is not None, "it has recovered", within_s=120)
    job.check_training(*groups)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_1000_equal_steps_with_a_restart_and_a_heal_name_nobody(
    make_job: MakeJob, lighthouse: Lighthouse, tmp_path: Path
) -> None:
    job = make_job(SlowActor, folder=tmp_path)
    groups = job.all_groups(*NAMES)
    job.start(*groups, pace_s=0.0)
    for _ in range(4):
        job.wait_steps(*groups, more=50, participants=4)
    groups[1].kill()
    job.wait_steps(groups[0], more=3, participants=3)
    job.start(groups[1], pace_s=0.0)
    for _ in range(16):
        job.wait_steps(*groups, more=50, participants=4)
    assert all(rank["compute_ratio_1m"] is not None for rank in status(lighthouse, job)["ranks"])
    assert incidents(lighthouse, job) == []
