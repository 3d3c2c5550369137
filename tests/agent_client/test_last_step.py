"""A script that ends with a step costs those nothing that are still in it."""

import time
from collections.abc import Sequence

import pytest

from agent_client.manager_client.watch import RELEASED_WITHIN_S
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankError, together

TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.scripted_actor:ScriptedActor"
SUM = (5, "float32", "sum")
STAYS_S = 1.0


def trained(job: Job, *names: str) -> Sequence[Rank]:
    """They are in the last step of their scripts: its sum is there, and nobody has voted."""
    ranks = job.groups(*names, actor=ACTOR)
    together(ranks, "steps", 3, SUM)
    together(ranks, "reduce", SUM)
    return ranks


def test_a_rank_stays_for_a_peer_that_has_not_voted_yet_and_that_goes_on_without_it(job: Job):
    first, late = trained(job, "a", "b")
    done = first.call("vote")
    closing = first.begin("close")
    time.sleep(STAYS_S)
    assert not closing.is_done()
    same = late.call("vote")
    assert (done["committed"], same["committed"]) == (True, True)
    assert (same["step"], same["quorum_id"]) == (done["step"], done["quorum_id"])
    assert len(same["participants"]) == 2
    alone = late.call("step", SUM)
    closing.result(within_s=60.0)
    assert (alone["committed"], alone["participants"]) == (True, ["b"])


def test_one_that_was_granted_another_step_does_not_end_it_either(job: Job):
    """It has come to the end of its script, too, and writes its model down."""
    first, writes, late = trained(job, "a", "b", "c")
    writes.call("vote")
    done = first.call("vote")
    closing = first.begin("close")
    time.sleep(STAYS_S)
    same = late.call("vote")
    assert (same["committed"], same["quorum_id"]) == (True, done["quorum_id"])
    closing.result(within_s=60.0)


def test_a_rank_that_is_alone_does_not_stay(job: Job):
    [rank] = trained(job, "a")
    rank.call("vote")
    began_at = time.monotonic()
    rank.call("close")
    assert time.monotonic() < began_at + RELEASED_WITHIN_S / 2


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_stays_for_its_mates_that_still_sum_what_follows_the_step(job: Job, is_killed: bool):
    """Until they have closed, too, or have ended."""
    ranks = list(job.groups_of(2, "a", actor=ACTOR).values())
    together(ranks, "steps", 3, SUM)
    closing = ranks[0].begin("close")
    time.sleep(STAYS_S)
    assert not closing.is_done()
    ranks[1].kill() if is_killed else ranks[1].call("close")
    ended_at = time.monotonic()
    closing.result()
    assert time.monotonic() < ended_at + RELEASED_WITHIN_S / 2


def test_a_group_that_was_away_at_the_end_of_the_job_trains_it_no_second_time(job: Job):
    ranks = trained(job, "a", "b")
    together(ranks, "vote")
    first, lost = ranks
    lost.kill()
    job.managers["b"].kill()
    first.call("steps", 6, SUM)
    first.call("close")
    [again] = job.groups("b", actor=ACTOR)
    with pytest.raises(RankError, match="the job ended at step 6: .* b was absent at the end and has step 0") as e:
        again.call("step", SUM)
    assert e.value.kind == "GroupDrained"
    job.start_managers("b", continue_=True)
    assert job.rank("b", actor=ACTOR).call("step", SUM)["participants"] == ["b"]
