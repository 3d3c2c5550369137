"""A peer dies in the middle of a backward pass: the very step commits, with the survivors' average, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import GradBucket, HashStore
from torch.nn import parallel

from agent_client.collectives.gloo import GlooGroup
from agent_client.progress.progress import Progress
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.training.ddp import Salvage
from tests.agent_client.jobs import Job
from tests.agent_client.lone_agent import LoneAgent
from tests.agent_client.ranks import Pending, Rank
from tests.agent_client.training.test_ddp import embedding, strided

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.ddp_actor:DdpActor"
PARAMETERS_BYTES = 4 * ((8 * 64 + 64) + 2 * (64 * 4 + 4))


def step_together(*ranks: Rank) -> list[Any]:
    return [each.result() for each in begin(*ranks)]


def begin(*ranks: Rank, branches: tuple[int, ...] = (), **options: Any) -> list[Pending]:
    return [rank.begin("step", *branches[place : place + 1], **options) for place, rank in enumerate(ranks)]


def average(*gradients: list[list[float] | None]) -> list[list[float] | None]:
    """Summed in the order of the ranks; who has not used a parameter adds zeros."""
    means: list[list[float] | None] = []
    for pieces in zip(*gradients, strict=True):
        used = [torch.tensor(piece) for piece in pieces if piece is not None]
        means.append((sum(used[1:], start=used[0]) / len(gradients)).tolist() if used else None)
    return means


def lose_in_backward(lost: Rank, *survivors: Rank, branches: tuple[int, ...] = (), **options: Any) -> list[Any]:
    lost.call("hold_backward")
    pending = begin(*survivors, branches=branches, **options)
    lost.begin("step")
    lost.call("wait_in_backward")
    assert not pending[0].is_done(within_s=0.2), "they wait for the last bucket"
    lost.kill()
    return [each.result() for each in pending]


def come_back(job: Job, a: Rank, b: Rank, until: int) -> Rank:
    """c, which all take to that step. It asks first: the others could be there before it does, and ask no more."""
    c = job.rank("c", seed=7, actor=ACTOR, salvage=True)
    logs = [c.begin("steps", until)]
    job.wait_joined("c")
    logs += [rank.begin("steps", until) for rank in (a, b)]
    assert len({log.result()[-1]["hash"] for log in logs}) == 1
    return c


def test_the_step_commits_with_the_survivors_average(job: Job) -> None:
    a, b, c = job.groups("a", "b", "c", actor=ACTOR, salvage=True)
    [first, *_] = step_together(a, b, c)
    assert first["committed"]
    assert first["participants"] == ["a", "b", "c"]
    before = step_together(a, b, c)
    of_a, of_b = lose_in_backward(c, a, b)
    assert [one["committed"] for one in (of_a, of_b)] == [True, True]
    assert [one["step"] for one in (of_a, of_b)] == [before[0]["step"] + 1] * 2
    assert of_a["participants"] == ["a", "b"]
    assert of_a["quorum_id"] > before[0]["quorum_id"]
    assert of_a["used"] == of_b["used"] == average(of_a["own"], of_b["own"])
    assert of_a["hash"] == of_b["hash"]
    assert a.call("held_bytes") == PARAMETERS_BYTES
    come_back(job, a, b, before[0]["step"] + 12)


def test_what_only_one_has_used_is_its_half(job: Job) -> None:
    """And what nobody has used has no gradient, as after a backward pass."""
    a, b, c = job.groups("a", "b", "c", actor=ACTOR, salvage=True)
    step_together(a, b, c)
    of_a, of_b = lose_in_backward(c, a, b, branches=(1, 1))
    assert of_a["used"] == of_b["used"] == average(of_a["own"], of_b["own"])
    assert of_a["used"][2:4] == [None, None]
    c = come_back(job, a, b, of_a["step"] + 6)
    of_a, of_b = lose_in_backward(c, a, b, branches=(0, 1))
    assert of_a["used"] == of_b["used"] == average(of_a["own"], of_b["own"])
    assert None not in of_a["used"]


@pytest.mark.parametrize("options", [{"extra": 2.0}, {"skips": True}, {"clips": True}])
def test_a_step_is_not_salvaged_if_its_gradients_are_not_those_that_are_kept(job: Job, options: dict[str, Any]) -> None:
    """The script's own reductions are not kept, and with a skipped batch, the kept ones are those of the last step."""
    a, b, c = job.groups("a", "b", "c", actor=ACTOR, salvage=True)
    step_together(a, b, c)
    of_a, of_b = lose_in_backward(c, a, b, **options)
    assert [one["committed"] for one in (of_a, of_b)] == [False, False]
    of_a, of_b = (each.result() for each in begin(a, b, **options))
    assert [one["committed"] for one in (of_a, of_b)] == [True, True]
    assert of_a["hash"] == of_b["hash"]
    assert of_a["extra"] == of_b["extra"] == options.get("extra")


def test_a_step_is_not_salvaged_if_a_scaler_has_unscaled_its_gradients() -> None:
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for others, can_salvage in ((dict[str, Any](), True), ({"scaler": torch.amp.GradScaler("cpu")}, False)):
        with Agent("127.0.0.1:1", state=TrainState(model, sgd, **others)) as agent:
            internals = agent.internals
            internals.salvage_by(lambda: None, lambda: 3)
            internals.machine.begin()
            internals.machine.reductions = 3
            assert internals.can_salvage == can_salvage
            internals.machine.reductions = 4
            assert not internals.can_salvage


def test_who_salvages_meets_who_computes_anew(job: Job) -> None:
    a, c = job.groups("a", "c", actor=ACTOR, salvage=True)
    job.start_managers("b")
    b = job.rank("b", seed=5, actor=ACTOR, salvage=False)
    step_together(a, b, c)
    c.call("hold_backward")
    of_a, of_b = begin(a, b)
    c.begin("step")
    c.call("wait_in_backward")
    c.kill()
    assert not of_b.result()["committed"]
    anew, salvaged = b.call("step"), of_a.result()
    assert [anew["committed"], salvaged["committed"]] == [True, True]
    assert anew["hash"] == salvaged["hash"]


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(strided, torch.arange(96.0).reshape(2, 3, 4, 4)), (embedding, torch.tensor([[1, 2], [2, 3]]))],
    ids=["memory order", "sparse"],
)
def test_each_bucket_is_split_into_the_gradients_of_its_parameters(
    make: Callable[[], torch.nn.Module], inputs: torch.Tensor
) -> None:
    model = make()
    group = GlooGroup(HashStore(), 0, 1, "127.0.0.1", connect_timeout_s=10.0, timeout_s=10.0)
    wrapped = parallel.DistributedDataParallel(model, process_group=group.for_torch("salvage"))
    agent: Any = LoneAgent()
    agent.progress = Progress()
    salvage = Salvage(agent)

    def keep(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        salvage.keep_bucket(bucket, "", [])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, keep)
    wrapped(inputs).square().mean().backward()
    computed = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for parameter, gradient in zip(model.parameters(), computed, strict=True):
        parameter.grad = torch.zeros_like(gradient)
    salvage.reduce_again()
    for parameter, gradient in zip(model.parameters(), computed, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.layout is gradient.layout
        assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())
    group.abort()
