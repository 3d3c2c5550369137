"""What a script does to the averaged gradients by state that heals, it does by the peer's state: no group diverges. One
that is told too late, when it has begun to compute, takes nothing from its peers."""

import time

from tests.agent_client.jobs import Job
from tests.agent_client.step.test_agent import check_equal, meet, step_together

ACTOR = "tests.agent_client.state_dependent_actor:StateDependentActor"
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")


def test_one_that_is_told_in_the_middle_of_a_step_adds_zeros_and_heals_before_the_next(job: Job) -> None:
    a, b = job.groups("a", "b", actor=ACTOR)
    meet(job, {"a": a, "b": b}, 2)
    of_a = a.begin("step")
    assert not b.call("step", error="mine")["committed"]
    assert of_a.result()["committed"]
    b.call("believe_that_it_is_current")
    of_b, of_a = step_together(b, a)
    assert (of_b["committed"], of_b["participated"], of_a["committed"]) == (False, False, True)
    assert "healing before the next" in job.log("b")
    of_b, of_a = step_together(b, a)
    assert (of_b["committed"], of_b["participated"]) == (True, True)
    assert check_equal([of_a], [of_b]) == 1


def test_its_no_takes_nothing_from_its_peers_however_far_apart_its_ranks_are(job: Job) -> None:
    """b/1 is through, and says no, before b/0 begins: a/0 waits for that in a collective which must not be ended."""
    ranks = job.groups_of(2, "a", "b", actor=ACTOR)
    for name in ("b/0", "b/1"):
        ranks[name].call("believe_that_it_is_current")
    ranks["b/0"].call("start_quorum")
    apart = {"within_group": False}
    of_a = [ranks[name].begin("step", **apart) for name in ("a/0", "a/1")]
    assert not ranks["b/1"].call("step", **apart)["committed"]
    time.sleep(0.5)  # an end of the quorum would be known to all by then
    assert not ranks["b/0"].call("step", **apart)["committed"]
    assert [pending.result()["committed"] for pending in of_a] == [True, True]
    told = step_together(*ranks.values())
    assert [(each["committed"], each["participated"]) for each in told] == [(True, True)] * 4
