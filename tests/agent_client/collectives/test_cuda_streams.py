"""Work on a tensor by another thread: in the order of its stream, where it has one."""

import threading

import pytest
import torch

from agent_client.collectives.nccl import in_stream_order

SLEEP_CYCLES = 1_000_000_000


def test_on_the_cpu_nothing_is_added() -> None:
    def act() -> int:
        return 1

    assert in_stream_order(torch.ones(1), act) is act


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_thread_sees_what_was_queued_and_leaves_it_done() -> None:
    tensor = torch.zeros(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor += 1
        act = in_stream_order(tensor, lambda: tensor.mul_(2))
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert tensor.sum().item() == 2000
