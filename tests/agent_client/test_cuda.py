"""CUDA tensors over gloo and NCCL, on one GPU: sums, abort, a group that stands still, and healing."""

import time

import pytest
import torch

from tests.agent_client.collectives.groups import ENDS_WITHIN_S, check_sums, meet, wait_in_all_reduce
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Start
from tests.agent_client.step.test_agent import check_equal
from tests.agent_client.step.test_agent import meet as step_into_one_quorum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("actor", ["CudaGlooActor", "NcclActor"])
def test_sums_and_an_abort_while_a_peer_is_stopped(store: str, start: Start, actor: str) -> None:
    survivor, stopped = ranks = start(2, f"tests.agent_client.cuda_actors:{actor}")
    meet(store, ranks)
    check_sums(ranks)
    stopped.stop()
    [waiting] = wait_in_all_reduce([survivor])
    survivor.call("abort")
    error, _ = waiting.result(ENDS_WITHIN_S)
    assert error
    stopped.resume()
    stopped.call("abort")
    meet(store, ranks)
    check_sums(ranks)


def test_a_peer_that_is_killed_ends_the_wait_and_nothing_after_it(store: str, start: Start) -> None:
    """Neither the group that is let go waits for torch's watchdog, nor does the monitor of the script's own group end
    the process, which it would after the two seconds that it sleeps here."""
    ranks = survivor, killed = start(2, "tests.agent_client.cuda_actors:NcclActor")
    survivor.call("make_default_group", monitor_sleeps_s=2)
    meet(store, ranks)
    check_sums(ranks)
    [waiting] = wait_in_all_reduce([survivor])
    killed.kill()
    error, _ = waiting.result(ENDS_WITHIN_S)
    assert "NCCL has lost a peer" in error
    survivor.begin("drop").result(ENDS_WITHIN_S)
    time.sleep(4.0)
    ranks = [survivor, *start(1, "tests.agent_client.cuda_actors:NcclActor")]
    meet(store, ranks)
    check_sums(ranks)


def test_a_group_heals_a_model_that_lies_on_the_device(job: Job) -> None:
    actor = {"actor": "tests.agent_client.cuda_actors:CudaAgentActor"}
    [a] = job.groups("a", **actor)
    a.call("steps", 2)
    [b] = job.groups("b", seed=1, **actor)
    of_b, of_a = step_into_one_quorum(job, {"b": b, "a": a}, 5)
    assert check_equal(of_a, of_b) == 3
    assert of_b[0]["participated"]


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_what_waits_in_a_kernel_for_a_lost_group_is_ended(job: Job, fault: str) -> None:
    """It costs the step in flight; one that was only stopped heals and goes on."""
    times = {"timeout_s": 5.0}
    actor = {"actor": "tests.agent_client.cuda_actors:NcclAgentActor"}
    a, b, c = job.groups("a", "b", "c", **times, **actor)
    assert check_equal(*step_into_one_quorum(job, {"a": a, "b": b, "c": c}, 2)) == 4
    logs = [rank.begin("steps", 6) for rank in (a, b)]
    c.call("ask")
    getattr(c, fault)()
    of_a, of_b = (log.result() for log in logs)
    assert check_equal(of_a, of_b) == 4
    assert [step["committed"] for step in of_a] == [False] + 4 * [True]
    assert of_a[-1]["participants"] == ["a", "b"]
    if fault == "stop":
        c.resume()
    else:
        [c] = [job.rank("c", seed=9, **times, **actor)]
    of_c, of_a, of_b = step_into_one_quorum(job, {"c": c, "a": a, "b": b}, 8)
    assert check_equal(of_c[-1:], of_a[-1:], of_b[-1:]) == 2
    assert of_c[-1]["participated"]
