"""Rank 0 evaluates and all learn the result; all say a number and learn who differs."""

import re
from typing import Any

import pytest
import torch

from agent_client import Agent, TrainState
from tests.agent_client.assignments import assignment
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank
from tests.processes import Lighthouse, eventually

ACTOR = "tests.agent_client.evaluating_actor:EvaluatingActor"
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s", "--min-replicas", "1")
RESULT = "{'accuracy': 15.23, 'by_class': tensor([0., 1., 2.]), 'nested': [(1, 'a'), None]}"


def start(job: Job, *names: str, ranks: int = 2) -> dict[str, Rank]:
    """After a step in one quorum."""
    found = job.groups_of(ranks, *names, actor=ACTOR)
    while len(together(found, "step")["a/0"]["participants"]) < len(names):
        pass
    return found


def begin(ranks: dict[str, Rank], method: str, *args: Any, **options: Any) -> dict[str, Any]:
    return {name: rank.begin(method, *args, **options) for name, rank in ranks.items()}


def together(ranks: dict[str, Rank], method: str, *args: Any, **options: Any) -> dict[str, Any]:
    return {name: pending.result() for name, pending in begin(ranks, method, *args, **options).items()}


def test_all_have_the_result_of_rank_0(job: Job) -> None:
    ranks = start(job, "a", "b")
    told = together(ranks, "evaluate")
    assert {each["result"] for each in told.values()} == {RESULT}
    assert [each["evaluated"] for each in told.values()] == [1, 0, 0, 0]
    assert all(step["committed"] for step in together(ranks, "step").values())

    lines = re.findall(r"\[rank (.*)", job.log("b"))
    for expected in (
        "b/0] starting validation",
        "b/0] skipping validation (only rank a/0 evaluates)",
        "b/1] waiting for validation metrics from rank a/0",
        "b/1] received validation metrics: {'accuracy': 15.23",
        "b/1] validation completed: {'accuracy': 15.23",
    ):
        assert any(line.startswith(expected) for line in lines), lines
    assert "[rank a/0] broadcasting validation metrics to the other ranks" in job.log("a")
    assert "[rank a/0] skipping" not in job.log("a")


def test_an_exception_is_raised_by_all_and_training_goes_on(job: Job) -> None:
    ranks = start(job, "a", "b")
    told = together(ranks, "evaluate", error="no such file: val.beton")
    assert (told["a/0"]["raised"], told["a/0"]["text"]) == ("ValueError", "no such file: val.beton")
    assert {(each["raised"], each["text"]) for name, each in told.items() if name != "a/0"} == {
        ("EvaluationFailed", "validation on rank a/0 has failed: ValueError: no such file: val.beton")
    }
    assert all(step["committed"] for step in together(ranks, "step").values())

    told = together(ranks, "evaluate", returns={1, 2})
    assert told["a/0"]["raised"] == "TypeError"
    assert all("state is a set, which cannot be sent" in each["text"] for each in told.values())


def test_a_whole_group_evaluates(job: Job) -> None:
    """As where its state is sharded; the error of any of its ranks is all ranks'."""
    ranks = start(job, "a", "b")
    told = together(ranks, "evaluate", whole_group=True)
    assert [each["evaluated"] for each in told.values()] == [1, 1, 0, 0]
    assert {each["result"] for each in told.values()} == {RESULT}

    pending = begin({name: ranks[name] for name in ("a/0", "b/0", "b/1")}, "evaluate", whole_group=True)
    failed = ranks["a/1"].call("evaluate", whole_group=True, error="a bad shard")
    assert failed["text"] == "a bad shard"
    assert {each.result()["text"] for each in pending.values()} == {
        "validation on rank a/1 has failed: ValueError: a bad shard"
    }


def test_who_differs_is_named(job: Job) -> None:
    ranks = start(job, "a", "b")
    assert all("raised" not in each for each in together(ranks, "check_equal", 25).values())
    odd = ranks.pop("b/1")
    pending = odd.begin("check_equal", 24)
    told = [*together(ranks, "check_equal", 25).values(), pending.result()]
    assert {each["raised"] for each in told} == {"RankMismatch"}
    assert {each["text"] for each in told} == {
        "ranks differ: batches per epoch = 24 at b/1; batches per epoch = 25 at a/0-1, b/0"
    }


def test_ranks_that_do_different_things_are_told_so(job: Job) -> None:
    ranks = start(job, "a", "b", ranks=1)
    pending = ranks["b/0"].begin("evaluate", what="test")
    told = ranks["a/0"].call("evaluate")
    assert (told["raised"], told["evaluated"]) == ("RankMismatch", 0)
    assert re.search(r'"validation", [12], true\] at a/0', told["text"])
    assert pending.result()["text"] == told["text"]


def test_a_step_must_have_been_done_and_none_be_under_way(job: Job) -> None:
    job.start_managers("a")
    rank = job.rank("a", actor=ACTOR)
    assert rank.call("check_equal", 25) == {"result": "None", "evaluated": 0}, "before the first step"
    assert "a step is under way" in rank.call("evaluate")["text"]
    rank.call("step")
    assert rank.call("evaluate")["result"] == RESULT
    rank.call("ask")
    assert "a step is under way" in rank.call("check_equal", 25)["text"]


def test_a_newcomer_s_check_keeps_nobody_waiting(job: Job) -> None:
    job.start_managers("a", "b")
    veteran = job.rank("a", actor=ACTOR)
    veteran.call("steps", 2)
    newcomer = job.rank("b", seed=1, actor=ACTOR)
    checks = newcomer.begin("check_equal", 24)
    job.wait_joined("b")  # else a could be through with its steps before that
    trains = veteran.begin("steps", 30)
    assert checks.result()["result"] == "None"
    assert newcomer.call("step")["participants"] == ["a", "b"]
    steps = newcomer.begin("steps", 30)
    assert trains.result()[-1]["hash"] == steps.result()[-1]["hash"]
    assert "compared inside this group only" in job.log("b")


def test_an_error_whose_text_is_no_text_is_raised_as_it_is() -> None:
    """The other ranks would wait for a day."""
    error = ValueError("no such file: caf\udce9.beton")

    def evaluate() -> None:
        raise error

    model = torch.nn.Linear(1, 1)
    with Agent("127.0.0.1:1", state=TrainState(model, torch.optim.SGD(model.parameters()))) as agent:
        agent.internals.runner.last = assignment(groups=1)
        with pytest.raises(ValueError, match="no such file") as raised:
            agent.evaluate_on_rank0(evaluate)
    assert raised.value is error


@pytest.mark.parametrize("of_b", [4, 5])
def test_groups_that_resume_check_inside_each_group(job: Job, of_b: int) -> None:
    """Whether their checkpoints are of the same step or not: one that heals could not know what the others compare."""
    ranks = dict(zip("ab", job.groups("a", "b", actor=ACTOR), strict=True))
    ranks["a"].call("load", 5)
    ranks["b"].call("load", of_b)
    assert {each.get("result") for each in together(ranks, "check_equal", 25).values()} == {"None"}
    assert [step["committed"] for step in together(ranks, "step").values()] == [True, True]
    assert {each["result"] for each in together(ranks, "check_equal", 25).values()} == {"None"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["a/0", "a/1", "b/0"])
def test_a_lost_rank_ends_the_wait_of_all(job: Job, lost: str) -> None:
    """Who waits for rank 0 learns of another's loss when rank 0 has evaluated, if not before."""
    ranks = start(job, "a", "b")
    ranks["a/0"].call("hold")
    pending = begin(ranks, "evaluate")
    ranks["a/0"].call("wait_evaluating")
    ranks[lost].kill()
    told = {name: each.result() for name, each in pending.items() if name.startswith("b") and name != lost}
    if lost != "a/0":
        ranks["a/0"].call("let_end")
    told |= {name: each.result() for name, each in pending.items() if name.startswith("a") and name != lost}
    assert {each["raised"] for each in told.values()} == {"EvaluationInterrupted"}, told
    if lost.startswith("a"):
        left = {name: rank for name, rank in ranks.items() if name.startswith("b")}
        eventually(lambda: together(left, "step")["b/0"]["participants"] == ["b"], "b trains on")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_longer_than_join_timeout_drops_nobody(job: Job, lighthouse: Lighthouse) -> None:
    """A newcomer comes in the middle, waits, and starts with the next step."""
    before = lighthouse.log()
    ranks = start(job, "a", "b", ranks=1)
    ranks["a/0"].call("hold")
    pending = begin(ranks, "evaluate")
    ranks["a/0"].call("wait_evaluating")
    job.start_managers("c")
    newcomer = job.rank("c", seed=3, actor=ACTOR)
    first = newcomer.begin("step")
    assert not first.is_done(within_s=8.0), "four times join_timeout"
    ranks["a/0"].call("let_end")
    assert {each.result()["result"] for each in pending.values()} == {RESULT}
    trained = begin(ranks, "steps", 30)
    healed = first.result()
    assert healed["participants"] == ["a", "b", "c"]
    ranks["c/0"], trained["c/0"] = newcomer, newcomer.begin("steps", 30)
    steps = {name: each.result() for name, each in trained.items()}
    assert all({"a", "b"} <= set(step["participants"]) for step in steps["a/0"]), "nobody was dropped"
    assert len({tried[-1]["hash"] for tried in steps.values()}) == 1
    assert {each["result"] for each in together(ranks, "evaluate").values()} == {RESULT}
    said = lighthouse.log()[len(before) :].splitlines()
    assert [line for line in said if f"[{job.name}]" in line and "lost" in line] == []
