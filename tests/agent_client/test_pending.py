"""A peer that comes during inner steps: known at once without a call, and in the next outer step."""

from itertools import pairwise

import pytest

from tests.agent_client.pending_training import PendingDiloco, PendingStreamed
from tests.agent_client.training_jobs import Group, MakeJob, TrainingJob
from tests.agent_client.training_kinds import INTERVAL
from tests.processes import eventually

TIMES = ("--join-timeout", "20s", "--heartbeat-timeout", "3s")
PACE_S = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("actor", "begins_before"), [(PendingDiloco, 0), (PendingStreamed, 2)])
def test_a_peer_that_comes_during_inner_steps_is_in_the_next_outer_step(
    actor: type, begins_before: int, make_job: MakeJob
) -> None:
    """`begins_before`: with how many inner steps to go an outer step begins."""
    job = make_job(actor)
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
    check_pending(job, a, begins_before)
    assert "waiting to join: late" in job.log_of(a)
    assert "joined: late" in job.log_of(a)


def check_pending(job: TrainingJob, group: Group, begins_before: int) -> None:
    assert job.discarded(group) == [], "a newcomer costs the others no step"
    seen = job.events(group, kind="inner")
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
