"""A peer that comes during inner steps: known at once without a call, and in the next outer step."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.agent_client.clusters import read_events
from tests.agent_client.outer_training import INTERVAL
from tests.agent_client.ranks import RankServer
from tests.agent_client.training_jobs import Event, Group, TrainingJob
from tests.processes import Lighthouse, eventually

pytestmark = pytest.mark.slow

ACTOR = "tests.agent_client.pending_training:PendingActor"
TIMES = ("--join-timeout", "20s", "--heartbeat-timeout", "3s")
PACE_S = 1.0
BEGINS_BEFORE = {"diloco": 0, "streamed": 2}
"""With how many inner steps to go an outer step begins."""


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse(*TIMES) as process:
        yield process


def events(job: TrainingJob, group: Group) -> list[Event]:
    return read_events(job._events(group, 0))


def inner_steps(job: TrainingJob, group: Group) -> list[Event]:
    return [event for event in events(job, group) if "inner" in event]


@pytest.mark.parametrize("way", BEGINS_BEFORE)
def test_a_peer_that_comes_during_inner_steps_is_in_the_next_outer_step(
    way: str, lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job = TrainingJob(lighthouse.address, store, rank_server, tmp_path, stack, actor=ACTOR, way=way)
        a = job.group("a")
        job.start(a, pace_s=PACE_S)
        job.wait_steps(a, more=2, participants=1)
        late = job.group("late")
        job.build(late)
        [rank] = a.ranks
        rank.call("hold")
        job.train(late, pace_s=PACE_S)
        eventually(lambda: rank.call("is_pending"), "a is told, in the middle of an inner step")
        rank.call("go")
        job.wait_steps(a, late, more=2, participants=2)
    check_pending(job, a, BEGINS_BEFORE[way])
    assert "ask to come in: late" in job.log(a)
    assert "admitted: late" in job.log(a)


def check_pending(job: TrainingJob, group: Group, begins_before: int) -> None:
    assert job.discarded(group) == [], "whoever comes costs the others no step"
    seen = inner_steps(job, group)
    pending = [event for event in seen if event["is_pending"]]
    assert pending, "it was known before it was in"
    assert {tuple(event["pending"]) for event in pending} == {("late",)}
    assert max(event["ranks"] for event in seen) == 2
    sizes = {event["step"]: event["participants"] for event in job.committed(group)}
    begins_at = INTERVAL - begins_before
    for event in pending:
        is_under_way = event["inner"] >= begins_at  # a fragment is in flight, of a quorum that has been asked for
        assert sizes[event["outer"] + 1 + is_under_way] == 2, f"{event}: in at the next outer step's own boundary"
    for before, after in pairwise(seen):
        is_boundary = before["inner"] + 1 in (begins_at, INTERVAL)
        assert after["calls"] - before["calls"] <= 2 * is_boundary, "one request and one vote an outer step, no poll"
