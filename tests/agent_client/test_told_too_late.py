"""A group that is told to heal when it has begun to compute, under a quorum that stands: its peers lose nothing."""

import time

from tests.agent_client.jobs import Job

ACTOR = "tests.agent_client.state_dependent_actor:StateDependentActor"
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")


def test_its_no_takes_nothing_from_its_peers_however_far_apart_its_ranks_are(job: Job) -> None:
    """b/1 is through, and says no, before b/0 begins: a/0 waits for that in a collective which must not be ended."""
    ranks = job.groups_of(2, "a", "b", actor=ACTOR, transform="scaler")
    for name in ("b/0", "b/1"):
        ranks[name].call("believe_that_it_is_current")
    ranks["b/0"].call("start_quorum")
    apart = {"within_group": False}
    of_a = [ranks[name].begin("step", **apart) for name in ("a/0", "a/1")]
    assert not ranks["b/1"].call("step", **apart)["committed"]
    time.sleep(0.5)  # an end of the quorum would be known to all by then
    assert not ranks["b/0"].call("step", **apart)["committed"]
    assert [pending.result()["committed"] for pending in of_a] == [True, True]
    together = [rank.begin("step") for rank in ranks.values()]
    told = [pending.result() for pending in together]
    assert [(each["committed"], each["participated"]) for each in told] == [(True, True)] * 4
