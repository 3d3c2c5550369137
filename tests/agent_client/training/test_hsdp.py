"""HSDP: sharded inside the group by FSDP2, replicated across groups by the Agent. Its faults: test_matrix.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agent_client.errors import ConfigurationError
from agent_client.training.hsdp import replicate
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankError, together
from tests.agent_client.sharded_training import RANKS, Log, adam_of, loss_of, model_of
from tests.agent_client.step.test_agent import begin_together, check_equal

ACTOR = "tests.agent_client.sharded_training:ShardedActor"
# A sharded rank's first step takes a while on a busy machine; a peer that is alive is waited for meanwhile.
TIMES = ("--join-timeout", "15s", "--heartbeat-timeout", "3s", "--standing-quorum", "off")
CONSTANT_BATCH = {"world_size_mode": "constant_batch", "world_size": 3}


def start(job: Job, *names: str, **options: Any) -> dict[str, Rank]:
    return job.groups_of(RANKS, *names, actor=ACTOR, **options)


def steps(job: Job, ranks: dict[str, Rank], until: int) -> dict[str, Log]:
    """All in one quorum."""
    return dict(zip(ranks, [each.result() for each in begin_together(job, ranks, until)], strict=True))


def shared_steps(logs: dict[str, Log]) -> int:
    """How many steps were committed by several groups; each with the same bits in the same rank of all of them."""
    counts = {check_equal(*(log for at, log in logs.items() if at.endswith(f"/{rank}"))) for rank in range(RANKS)}
    [count] = counts
    return count


@pytest.mark.parametrize("way", ["hook", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_from_different_weights_to_the_same_bits_and_one_that_comes_late_heals(job: Job, way: str) -> None:
    first = start(job, "a", "b", way=way)
    assert first["a/0"].call("hash") != first["b/0"].call("hash")
    assert shared_steps(steps(job, first, until=2)) == 2
    late = start(job, "late", way=way, seed=7)
    then = steps(job, late | first, until=5)
    assert shared_steps(then) == 6
    assert [(step["committed"], step["participated"]) for step in then["late/0"]] == 3 * [(True, True)]
    assert then["late/0"][-1]["participants"] == ["a", "b", "late"]


def test_a_forward_pass_begins_a_step(job: Job) -> None:
    ranks = start(job, "a", "b")
    of_a0, of_a1, *of_b = together(ranks.values(), "loop", 3)
    assert [of_a0, of_a1] == of_b
    assert [seen["step"] for seen in of_a0] == [1, 2, 3]


def test_a_whole_group_evaluates_what_is_sharded(job: Job) -> None:
    """Rank 0 alone would wait for the others' shards; fewer are refused."""
    ranks = start(job, "a", "b")
    steps(job, ranks, until=2)
    told = together(ranks.values(), "evaluate")
    assert len({loss for loss, _ in told}) == 1
    assert [times for _, times in told] == [1, 1, 0, 0]
    with pytest.raises(RankError, match="rank 0 alone would wait for the others' shards"):
        ranks["a/0"].call("evaluate", whole_group=False)
    assert shared_steps(steps(job, ranks, until=3)) == 1


def weights_without_groups(seed: int, steps: int, places: int) -> float:
    """As one process would train on the batches of all places."""
    model = model_of(seed)
    adam = adam_of(model)
    for step in range(steps):
        adam.zero_grad()
        for place in range(places):
            (loss_of(model, step, place) / places).backward()
        adam.step()
    return sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "microbatches"),
    [({}, 2), (CONSTANT_BATCH, 3)],
    ids=["hook", "constant batch"],
)
def test_it_trains_as_one_process_would(job: Job, options: dict[str, Any], microbatches: int) -> None:
    """And the ranks of a group hold different shards. `microbatches`: of two groups, in each step."""
    logs = steps(job, start(job, "a", "b", seed=7, **options), until=4)
    ends = [logs["a/0"][-1], logs["a/1"][-1]]
    expected = weights_without_groups(7, 4, microbatches * RANKS)
    assert sum(end["weights"] for end in ends) == pytest.approx(expected, rel=1e-5)
    assert ends[0]["hash"] != ends[1]["hash"]


def test_torch_s_own_functions_work_on_the_sharded_model(job: Job) -> None:
    for before, after in together(start(job, "a").values(), "clip_and_gather", 1.0):
        assert before == pytest.approx((45 + 24 + 5) ** 0.5)
        assert after == pytest.approx(1.0, rel=1e-4)


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing in the module is sharded: call torch's fully_shard first"):
        replicate(nn.Linear(2, 2), mock.Mock())


@contextmanager
def replicated() -> Iterator[tuple[nn.Sequential, Any, Any]]:
    """A model sharded over this process alone, its mesh, and its part of the Agent."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), model_of(0)
        fully_shard(model, mesh=mesh)
        agent = mock.Mock()
        replicate(model, agent)
        yield model, mesh, agent.internals.add_part.call_args.args[0]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_parameter_that_comes_later_is_named(is_sharded: bool) -> None:
    """FSDP2 averages the gradients of a new head in the group at best, and none over the groups."""
    with replicated() as (model, mesh, part):
        loss_of(model, 0, 0).backward()
        part.share_buffers()
        head = nn.Linear(4, 1)
        model[4] = fully_shard(head, mesh=mesh) if is_sharded else head
        loss_of(model, 1, 0).backward()
        with pytest.raises(
            ConfigurationError, match=r"^4\.weight was frozen or missing .* replicate\(model, agent\) again"
        ):
            part.share_buffers()


def test_parameters_that_are_frozen_and_thawed_or_loaded_in_place_are_still_averaged() -> None:
    with replicated() as (model, _, part):
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        for step in range(2):
            loss_of(model, step, 0).backward()
            part.share_buffers()
            model.load_state_dict(model.state_dict())
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        for parameter in model.parameters():
            assert parameter.grad is not None
