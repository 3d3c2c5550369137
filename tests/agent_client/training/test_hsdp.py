"""HSDP: sharded inside the group by FSDP2, replicated across groups by the Agent: the same bits whatever is killed."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from agent_client.training.hsdp import replicate
from examples.daemons import ROOT
from tests.agent_client.agent.test_agent import check_equal
from tests.agent_client.clusters import Cluster, check_all, fork_server
from tests.agent_client.ranks import RankEnded, RankError, RankServer
from tests.agent_client.sharded_training import RANKS, Log, ShardedJob, adam_of, loss_of, model_of, results
from tests.processes import Lighthouse

WAYS = ["hook", "mesh"]
SEED = 20261121
KILLS = 20

# A sharded rank's first step takes a while on a busy machine; a peer that is alive is waited for meanwhile.
TIMES = ("--join-timeout", "15s", "--heartbeat-timeout", "3s", "--standing-quorum", "off")


@pytest.fixture
def job(lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path) -> Iterator[ShardedJob]:
    with ExitStack() as stack:
        yield ShardedJob(lighthouse.address, store, rank_server, tmp_path, stack)


def shared_steps(*logs: dict[str, list[Log]]) -> int:
    """How many steps were committed by several groups; each with the same bits in the same rank of all of them."""
    by_rank = [[ranks[rank] for log in logs for ranks in log.values()] for rank in range(RANKS)]
    counts = [check_equal(*of_rank) for of_rank in by_rank]
    assert len(set(counts)) == 1, "the ranks of a group commit the same steps"
    return counts[0]


def fates(log: Log) -> list[tuple[bool, bool]]:
    return [(step["committed"], step["participated"]) for step in log]


@pytest.mark.parametrize("way", ["hook", *(pytest.param(way, marks=pytest.mark.slow) for way in ("mesh", "bfloat16"))])
def test_from_different_weights_to_the_same_bits_and_one_that_comes_late_heals(job: ShardedJob, way: str) -> None:
    a, b = job.start("a", "b", way=way)
    assert a.call("hash") != b.call("hash")
    first = job.steps(a, b, until=2)
    assert shared_steps(first) == 2
    [late] = job.start("late", way=way)
    then = job.steps(late, a, b, until=5)
    assert shared_steps(then) == 6
    assert fates(then["late"][0]) == 3 * [(True, True)]
    assert then["late"][0][-1]["participants"] == ["a", "b", "late"]


def test_a_forward_pass_begins_a_step(job: ShardedJob) -> None:
    a, b = job.start("a", "b")
    pending = [each for group in (a, b) for each in group.begin("loop", 3)]
    of_a0, of_a1, of_b0, of_b1 = [each.result() for each in pending]
    assert (of_a0, of_a1) == (of_b0, of_b1)
    assert [seen["step"] for seen in of_a0] == [1, 2, 3]


def test_a_whole_group_evaluates_what_is_sharded(job: ShardedJob) -> None:
    """Rank 0 alone would wait for the others' shards; fewer are refused."""
    a, b = job.start("a", "b")
    job.steps(a, b, until=2)
    told = [each.result() for each in [*a.begin("evaluate"), *b.begin("evaluate")]]
    assert len({loss for loss, _ in told}) == 1
    assert [times for _, times in told] == [1, 1, 0, 0]
    with pytest.raises(RankError, match="rank 0 alone would wait for the others' shards"):
        a.ranks[0].call("evaluate", whole_group=False)
    assert shared_steps(job.steps(a, b, until=3)) == 1


def weights_without_groups(seed: int, steps: int) -> float:
    """As one process would train on the batches of both groups."""
    model = model_of(seed)
    adam = adam_of(model)
    for step in range(steps):
        adam.zero_grad()
        places = 2 * RANKS
        for place in range(places):
            (loss_of(model, step, place) / places).backward()
        adam.step()
    return sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())


@pytest.mark.slow
def test_both_ways_train_alike_and_as_one_process_would(job: ShardedJob) -> None:
    """And the ranks of a group hold different shards."""
    hashes: list[list[str]] = []
    for way in WAYS:
        other = job.elsewhere()
        a, b = other.start("a", "b", way=way, seed=7)
        ends = [log[-1] for log in other.steps(a, b, until=4)["a"]]
        assert sum(end["weights"] for end in ends) == pytest.approx(weights_without_groups(7, 4), rel=1e-5)
        hashes.append([end["hash"] for end in ends])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == RANKS


@pytest.mark.parametrize("way", ["hook", pytest.param("mesh", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "victims",
    [("c",), pytest.param(("a",), marks=pytest.mark.slow), pytest.param(("a", "c"), marks=pytest.mark.slow)],
    ids=["the last", "the first", "two of three"],
)
def test_groups_that_are_killed_in_a_step_cost_that_step_and_heal_when_they_are_back(
    job: ShardedJob, victims: tuple[str, ...], way: str
) -> None:
    groups = {group.name: group for group in job.start("a", "b", "c", way=way)}
    begun = job.steps(*groups.values(), until=2)
    pending = {name: groups[name].begin("steps", 5) for name in groups if name not in victims}
    for name in victims:
        groups[name].call("ask")
        groups[name].kill()
    survivors = results(pending)
    for name, [log, _] in survivors.items():
        discarded = [fate for fate in fates(log) if fate != (True, True)]
        assert discarded in ([(False, False)], len(victims) * [(False, False)]), "a step for each death at the most"
        assert not log[0]["committed"]
        assert len(log) == len(discarded) + 3
        assert log[0]["hash"] == begun[name][0][-1]["hash"], "a discarded step leaves everything as it was"
    back = job.start(*victims, way=way)
    healed = job.steps(*back, *(groups[name] for name in survivors), until=7)
    assert all(fates(healed[name][0])[-2:] == 2 * [(True, True)] for name in victims)
    assert shared_steps(begun, survivors, healed) > 0
    assert healed["b"][0][-1]["participants"] == ["a", "b", "c"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_group_of_which_one_rank_is_killed_fails_as_one(job: ShardedJob, rank: int) -> None:
    a, b = job.start("a", "b")
    job.steps(a, b, until=2)
    of_b = b.begin("steps", 5)
    a.call("ask")
    a.ranks[rank].kill()
    with pytest.raises(RankError) as raised:
        a.ranks[1 - rank].call("step", within_s=30.0)
    assert raised.value.kind == "RuntimeError", "its forward pass needs the shards of the other"
    a.kill()
    logs = [pending.result() for pending in of_b]
    assert all(fates(log)[-3:] == 3 * [(True, True)] for log in logs)
    [a] = job.start("a")
    assert shared_steps(job.steps(a, b, until=7)) == 2


@pytest.mark.parametrize(
    "victim",
    ["a", pytest.param("c", marks=pytest.mark.slow), pytest.param("b", marks=pytest.mark.slow)],
    ids=["source", "bystander", "target"],
)
def test_a_death_during_a_healing(job: ShardedJob, victim: str) -> None:
    """The ranks of b heal from those of a and of c."""
    a, c = job.start("a", "c")
    begun = job.steps(a, c, until=2)
    [b] = job.start("b")
    groups = {"a": a, "b": b, "c": c}
    b.call("hold_fetch")
    pending = job.begin_steps(b, a, c, until=7)
    b.call("wait_fetching")
    job.managers[victim].kill()
    groups[victim].kill()
    if victim == "b":
        with pytest.raises(RankEnded):
            pending.pop("b")[0].result()
    else:
        pending.pop(victim)
        b.call("allow_fetch")
    logs = results(pending)
    assert shared_steps(begun, logs) >= 2 + 4
    assert all(
        log[-1]["participants"] == sorted({"a", "b", "c"} - {victim}) for ranks in logs.values() for log in ranks
    )


def test_one_rank_s_error_discards_the_step_in_its_whole_group(job: ShardedJob) -> None:
    a, b = job.start("a", "b")
    begun = job.steps(a, b, until=1)
    others = [a.ranks[0].begin("step"), *b.begin("step")]
    failed = a.ranks[1].call("step", error="mine alone")
    of_a, *of_b = [pending.result() for pending in others]
    assert not failed["committed"]
    assert failed["hash"] == begun["a"][1][-1]["hash"]
    assert not of_a["committed"]
    assert all(step["committed"] for step in of_b)
    healed = job.steps(a, b, until=3)
    assert shared_steps(healed) == 1
    assert fates(healed["a"][0]) == [(True, True)]


@pytest.mark.slow
def test_survivors_take_over_the_microbatches_of_a_killed_group(job: ShardedJob) -> None:
    """In constant_batch mode, so the weights go on as if nobody had died."""
    mode = {"world_size_mode": "constant_batch", "world_size": 3, "seed": 5}
    a, b, c = job.start("a", "b", "c", **mode)
    job.steps(a, b, c, until=2)
    pending = {group.name: group.begin("steps", 5) for group in (a, b)}
    c.call("ask")
    c.kill()
    survivors = results(pending)
    assert shared_steps(survivors) == 3
    whole = job.elsewhere()
    undisturbed = whole.steps(*whole.start("a", "b", "c", **mode), until=5)
    for disturbed, smooth in zip(survivors["a"], undisturbed["a"], strict=True):
        assert disturbed[-1]["weights"] == pytest.approx(smooth[-1]["weights"], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_torch_s_own_functions_work_on_the_sharded_model(job: ShardedJob, way: str) -> None:
    [a] = job.start("a", way=way)
    for before, after in a.call("clip_and_gather", 1.0):
        assert before == pytest.approx((45 + 24 + 5) ** 0.5)
        assert after == pytest.approx(1.0, rel=1e-4)


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing in the module is sharded: call torch's fully_shard first"):
        replicate(nn.Linear(2, 2), mock.Mock())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_any_moment_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    """The example itself, under a standing quorum."""
    rng = random.Random(SEED)
    script = ROOT / "examples/train_hsdp.py"
    with (
        fork_server(tmp_path) as forks,
        Cluster(forks, tmp_path, groups=3, ranks=2, pace_s=0.05, script=script) as cluster,
    ):
        cluster.start_lighthouse()
        cluster.start_groups(*cluster.groups)
        cluster.wait_steps(*cluster.groups, more=3, participants=3)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.0, 1.0))
            stays, *others = rng.sample(cluster.groups, 3)
            victims = others[: rng.choice((1, 1, 2))]
            for victim in victims:
                cluster.kill(victim, with_manager=rng.random() < 0.3)
            time.sleep(rng.uniform(0.0, 1.0))
            cluster.wait_steps(stays, more=1, participants=3 - len(victims))
            cluster.start_groups(*victims)
            cluster.wait_steps(*cluster.groups, more=2, participants=3)
        for rank in "01":
            assert check_all(tmp_path, rank) > 4 * KILLS
