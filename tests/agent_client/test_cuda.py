"""CUDA tensors over gloo, on one GPU: sums, abort and healing. NCCL among several, where there are several."""

import pytest
import torch

from tests.agent_client.agent.test_agent import check_equal
from tests.agent_client.agent.test_agent import meet as step_into_one_quorum
from tests.agent_client.collectives.groups import ENDS_WITHIN_S, check_sums, meet, wait_in_all_reduce
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

one_gpu_is_not_enough = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two NCCL ranks do not fit one GPU, and there is only one"
)


@pytest.mark.parametrize("actor", ["CudaGlooActor", pytest.param("NcclActor", marks=one_gpu_is_not_enough)])
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


def test_a_group_heals_a_model_that_lies_on_the_device(job: Job) -> None:
    actor = {"actor": "tests.agent_client.cuda_actors:CudaAgentActor"}
    [a] = job.groups("a", **actor)
    a.call("steps", 2)
    [b] = job.groups("b", seed=1, **actor)
    of_b, of_a = step_into_one_quorum(job, {"b": b, "a": a}, 5)
    assert check_equal(of_a, of_b) == 3
    assert of_b[0]["participated"]
