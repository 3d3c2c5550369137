"""A group that does something else than its peers ends by itself, with the cause. Where a quorum stands, and what the
others lose: test_mismatch_standing.py.

Real gloo between processes: before the participants compared, a smaller sum ended the process by SIGABRT.
"""

import contextlib

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import RankError, together

SCRIPTED = "tests.agent_client.scripted_actor:ScriptedActor"
ENDS_WITHIN_S = 5.0

Sums = tuple[tuple[int, str, str], ...]

RIGHT: Sums = ((145, "float32", "generator"), (3, "float32", "generator"))
OTHERS: dict[str, tuple[Sums, str]] = {
    "a smaller sum": (((100, "float32", "generator"), RIGHT[1]), "reduces 400 bytes of float32 (generator) as"),
    "another dtype": (((290, "bfloat16", "generator"), RIGHT[1]), "reduces 580 bytes of bfloat16 (generator) as"),
    "another turn": (((145, "float32", "critic"), RIGHT[1]), "reduces 580 bytes of float32 (critic) as collective 1"),
    "one sum less": (RIGHT[:1], "ends the step after 1 collectives"),
}


def test_the_agent_at_fault_is_of_no_further_use(job: Job) -> None:
    a, b = job.groups("a", "b", actor=SCRIPTED)
    a.begin("step", *RIGHT)
    job.wait_joined("a")
    ended = b.call("step", *RIGHT[:1])["mismatch"]
    assert b.call("step", *RIGHT)["mismatch"] == ended


def test_other_data(job: Job) -> None:
    """Each group would train on samples of the other one, and leave others out."""
    a, b = job.groups("a", "b", actor=SCRIPTED)
    assert a.call("draw", 1000, 8, 0)["committed"]
    of_b = b.begin("draw", 990, 8, 0)
    job.wait_joined("b")
    assert not a.call("draw", 1000, 8, 0)["committed"]
    where = "where a draws from 1000 samples, in batches of 8, in the order of seed 0"
    told = "990 samples, in batches of 8, in the order of seed 0"
    assert f"this group (b) draws from {told} {where}" in of_b.result(ENDS_WITHIN_S)["mismatch"]
    assert a.call("draw", 1000, 8, 0)["data"] == {
        "length": 1000,
        "batch_size": 8,
        "accumulate": 1,
        "seed": 0,
        "samples": 16,
        "epoch": 0,
        "position": 16,
        "irregular_steps": 0,
        "is_exact": True,
    }


def test_data_that_each_group_divides_for_itself(job: Job) -> None:
    """Both have the same samples: said once, when the first step together is done."""
    a, b = job.groups("a", "b", actor=SCRIPTED)
    for rank in (a, b):
        rank.call("divide_data")
    assert a.call("steps", 2, *RIGHT)
    of_b = b.begin("steps", 5, *RIGHT)
    job.wait_joined("b")
    a.call("steps", 5, *RIGHT)
    of_b.result()
    told = "a DistributedSampler divides its 40 samples among the 1 ranks of this replica group only"
    assert [job.log(name).count(told) for name in ("a", "b")] == [1, 1]


def test_a_mismatch_at_one_rank_ends_its_whole_group(job: Job) -> None:
    of_a = list(job.groups_of(2, "a", actor=SCRIPTED).values())
    assert all(step["committed"] for step in together(of_a, "step", *RIGHT))
    c0, c1 = job.groups_of(2, "c", actor=SCRIPTED).values()
    pending = [c0.begin("step", *RIGHT), c1.begin("step", *RIGHT[:1])]
    job.wait_joined("c")
    lost = [rank.begin("step", *RIGHT) for rank in of_a]
    assert "mismatch" in pending[1].result(ENDS_WITHIN_S)
    with contextlib.suppress(RankError):  # it may learn of it in this step, or in the next
        assert not pending[0].result(ENDS_WITHIN_S)["committed"]
    with pytest.raises(RankError, match="lost this replica group: ScriptMismatch: step 1: this group"):
        c0.begin("step", *RIGHT).result(ENDS_WITHIN_S)
    assert not any(each.result(ENDS_WITHIN_S)["committed"] for each in lost)
    assert all(step["committed"] for step in together(of_a, "step", *RIGHT))


def test_an_error_of_the_script_s_own_is_no_mismatch_and_holds_nobody(job: Job) -> None:
    """In the first step under a quorum: the others wait for the announcement of its end."""
    a, b = job.groups("a", "b", actor="tests.agent_client.actors:AgentActor")
    of_b = b.begin("step", error="the loss is not a number")
    job.wait_joined("b")
    of_a = a.begin("step")
    assert not of_b.result()["committed"]
    assert not of_a.result(ENDS_WITHIN_S)["committed"]
    of_b = b.begin("step")
    assert a.call("step")["committed"]
    assert of_b.result()["committed"]


def test_values_that_only_one_compares_before_the_first_step(job: Job) -> None:
    """In silence, or with an abort of the process, they would be summed with the other one's gradients."""
    a, b = job.groups("a", "b", actor=SCRIPTED)
    of_b = b.begin("check_equal")
    job.wait_joined("b")
    of_a = a.begin("step", *RIGHT)
    told = of_b.result(ENDS_WITHIN_S)
    assert "this group (b) gathers values (check_equal) where a reduces 580 bytes" in told
    assert not of_a.result(ENDS_WITHIN_S)["committed"]
    assert "mismatch" in b.call("step", *RIGHT)
    assert a.call("step", *RIGHT)["committed"]


def test_the_turn_of_a_gan_by_the_quorum_s_step_is_the_same_for_all(job: Job) -> None:
    """Each step is the turn of one of two networks. By a counter of the script's own it is "another turn"."""
    [a] = job.groups("a", actor=SCRIPTED)
    assert a.call("take_turn")["turn"] == 0
    [c] = job.groups("c", seed=1, actor=SCRIPTED)
    for turn in (1, 0, 1):
        of_c = c.begin("take_turn")
        job.wait_joined("c")
        of_a, of_c = a.call("take_turn"), of_c.result()
        assert of_a["participants"] == ["a", "c"]
        assert (of_a["committed"], of_a["turn"], of_c["turn"]) == (True, turn, turn)
