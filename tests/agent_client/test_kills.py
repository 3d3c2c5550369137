"""Kills at moments drawn at random, each made good by a start, for minutes: no group ever trains on with other bits."""

import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.agent_client.clusters import all_events
from tests.agent_client.matrix_events import Cell, finish
from tests.agent_client.training_jobs import Group, MakeJob, TrainingJob
from tests.agent_client.training_kinds import WAYS
from tests.processes import eventually

# How long a group is waited for that has nothing to say.
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
SEED = 20261121
KILLS = 25
PACE_S = 0.05
MAX_WAIT_S = 1.0
"""A kill comes at most so long after training went on, a start at most so long after its kill."""
MANAGER_SHARE = 0.3
STALLS_AT_MOST_S = 90.0


def victims_of(job: TrainingJob, groups: list[Group], rng: random.Random) -> list[Group]:
    """One, or all but one that holds the state: it has committed a step since its own start."""
    order = rng.sample(groups, len(groups))
    holds: Callable[[Group], bool] = lambda group: all(job.committed(group, rank) for rank in range(job.ranks))  # noqa: E731
    survivor = eventually(lambda: next(filter(holds, order), None), "a group holds the state")
    others = [group for group in order if group is not survivor]
    return others[: rng.choice((1, 1, 2))]


def longest_stall_s(job: TrainingJob) -> float:
    """Between two committed steps of any group."""
    times = sorted(event["time"] for events in all_events(job.folder) for event in events)
    return max(after - before for before, after in pairwise(times))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_kills_at_any_moment_leave_no_trace_in_the_weights(make_job: MakeJob, way: str) -> None:
    job, rng = make_job(WAYS[way]), random.Random(f"{SEED} {way}")
    groups = job.all_groups("a", "b", "c")
    job.start(*groups, pace_s=PACE_S)
    job.wait_steps(*groups, more=2, participants=3)
    for _ in range(KILLS):
        time.sleep(rng.uniform(0, MAX_WAIT_S))  # the drawn moment, whatever happens in it
        victims = victims_of(job, groups, rng)
        for victim in victims:
            victim.kill(with_manager=rng.random() < MANAGER_SHARE)
        time.sleep(rng.uniform(0, MAX_WAIT_S) ** 2)
        job.start(*victims, pace_s=PACE_S)
    job.wait_steps(*groups, more=3, participants=3)
    finish(Cell(way, job), groups)
    assert longest_stall_s(job) < STALLS_AT_MOST_S
