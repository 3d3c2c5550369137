"""Loops as people write them: whatever begins a step, the groups agree on every bit that they commit."""

import queue
from contextlib import suppress
from typing import Any

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankError, together
from tests.agent_client.training.test_progress_push import OK, receiver

ACTOR = "tests.agent_client.loop_actor:LoopActor"
ORDERS = ("zero_first", "zero_last", "zero_model", "zero_before_and_last", "closure")


def train(order: str, until: int, *ranks: Rank) -> list[list[dict[str, Any]]]:
    return together(ranks, "train", order, until)


def check_equal(*histories: list[dict[str, Any]]) -> None:
    """Those who committed the same step have the same weights, buffers and learning rate after it."""
    first = {seen["step"]: seen for seen in histories[0]}
    for history in histories[1:]:
        assert history == [first[seen["step"]] for seen in history]


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_may_zero_its_gradients_where_it_likes(job: Job, order: str) -> None:
    """Three steps, then a group comes back with nothing, and three more. Between two steps none is under way."""
    a, b = job.groups("a", "b", actor=ACTOR)
    check_equal(*train(order, 3, a, b))
    assert [rank.call("evaluate") for rank in (a, b)] == [False, False]
    assert a.call("steps_told") == [1, 2, 3]
    b.kill()
    again = job.rank("b", seed=7, actor=ACTOR)
    coming = again.begin("train", order, 7)
    job.wait_joined("b")  # else a goes on without it after the join timeout
    [of_a], of_b = train(order, 7, a), coming.result()
    check_equal(of_a, of_b)
    assert [seen["step"] for seen in of_a] == [4, 5, 6, 7]
    assert of_b[-1]["step"] == 7
    assert a.call("steps_told") == [1, 2, 3, 4, 5, 6, 7]


def test_the_first_group_pushes_the_progress_and_the_next_one_after_its_death(job: Job) -> None:
    a, b = job.groups("a", "b", actor=ACTOR)
    with receiver(OK) as hook:
        for rank in (a, b):
            rank.call("push_to", hook.url, 6)
        train("zero_first", 3, a, b)
        of_a = hook.bodies.get(timeout=60.0)
        while not hook.bodies.empty():
            assert hook.bodies.get()["replica_id"] == "a"
        a.kill()
        of_b: dict[str, Any] = {"replica_id": "a"}
        for until in range(4, 60):  # a push may end after the step that follows it
            train("zero_first", until, b)
            with suppress(queue.Empty):
                while of_b["replica_id"] == "a":  # the last ones before its death
                    of_b = hook.bodies.get(timeout=1.0)
            if of_b["replica_id"] == "b":
                break
    assert (of_a["replica_id"], of_a["participants"]) == ("a", 2)
    assert (of_b["replica_id"], of_b["participants"]) == ("b", 1)
    assert 4 <= of_b["step"] < 60
    assert 0.0 < of_b["goodput"] <= 1.0


@pytest.mark.parametrize(
    ("order", "options", "at"),
    [
        ("zero_first", {}, "late"),
        ("zero_last", {"find_unused_parameters": True}, "late"),
        ("zero_model", {"gradient_as_bucket_view": True}, "late"),
        ("zero_first", {}, "early"),
    ],
)
def test_a_step_whose_backward_pass_was_given_up_is_discarded(
    job: Job, order: str, options: dict[str, Any], at: str
) -> None:
    """The peers' next buckets must not meet those of the pass that came after it. `early`: it had reduced nothing yet,
    so the peers commit the step without its batch."""
    a, b = job.groups("a", "b", actor=ACTOR, ddp=options)
    check_equal(*train(order, 2, a, b))
    of_a = a.begin("train", order, 4)
    assert b.call("give_up", order, at) == "out of memory, says a test"
    of_b = b.begin("train", order, 4)
    check_equal(of_a.result(), of_b.result())
    is_lost = at == "late"
    assert ("step 2 discarded" in job.log("a"), "was abandoned" in job.log("b")) == (is_lost, is_lost)
    assert is_lost or "step 2 discarded: the script has left it out" in job.log("b")


def test_a_pass_may_be_given_up_before_its_quorum_is_known(job: Job) -> None:
    """Mostly it is not: b asks alone. The quorum of its step is the one that it has left by then, and it does not try
    to meet the peers there again (collectives/test_peers.py): it would wait in vain."""
    a, b = job.groups("a", "b", actor=ACTOR)
    check_equal(*train("zero_first", 2, a, b))
    assert b.call("give_up", "zero_first", "late") == "out of memory, says a test"
    check_equal(*train("zero_first", 4, a, b))
    assert "step 2 discarded" in job.log("a")


def test_a_pass_that_was_given_up_ends_a_rank_of_a_group_of_several(job: Job) -> None:
    """Its neighbours wait for it in sums of the group's own, which no quorum ends: the group must be restarted."""
    first, other = job.groups_of(2, "a", actor=ACTOR).values()
    train("zero_first", 2, first, other)
    other.begin("train", "zero_first", 3)
    assert first.call("give_up", "zero_first", "late") == "out of memory, says a test"
    with pytest.raises(RankError, match="AgentError: a backward pass was abandoned .* its group restarts"):
        first.call("train", "zero_first", 3)


def test_a_step_that_a_gradscaler_skips_goes_on_with_the_next_pass(job: Job) -> None:
    """It skips it in all groups alike: the mean is infinite everywhere. The scheduler does not move."""
    a, b = job.groups("a", "b", actor=ACTOR)
    of_a, of_b = train("scaled", 4, a, b)
    check_equal(of_a, of_b)
    assert [seen["rate"] for seen in of_a] == pytest.approx([0.1 * 0.9**step for step in (1, 2, 3, 4)])
    assert "discarded" not in job.log("a") + job.log("b")
    assert a.call("steps_told") == [1, 2, 3, 4]


def test_a_gradscaler_does_not_move_with_a_discarded_step(job: Job) -> None:
    """Its update() is called after each step(): torch asks for that."""
    a, b = job.groups("a", "b", actor=ACTOR)
    train("scaled", 2, a, b)
    before = a.call("scaler_state")
    together((a, b), "discard_scaled")
    check_equal(*train("scaled", 3, a, b))
    after = [rank.call("scaler_state") for rank in (a, b)]
    assert after == [before | {"_growth_tracker": before["_growth_tracker"] + 1}] * 2


def test_the_statistics_of_a_discarded_step_are_as_they_were(job: Job) -> None:
    """Buffers are those of the last commit, also where the discard was this group's own."""
    a, b = job.groups("a", "b", actor=ACTOR)
    [[*_, of_a], _] = train("zero_first", 2, a, b)
    assert together((a, b), "discard", "the test says so") == [of_a["buffers"]] * 2
    check_equal(*train("zero_first", 4, a, b))


def test_without_broadcast_buffers_each_group_keeps_its_own(job: Job) -> None:
    a, b = job.groups("a", "b", actor=ACTOR, ddp={"broadcast_buffers": False})
    of_a, of_b = train("zero_first", 3, a, b)
    assert [seen["weights"] for seen in of_a] == [seen["weights"] for seen in of_b]
    assert of_a[-1]["buffers"] != of_b[-1]["buffers"]
