"""Work on a CUDA tensor that another thread does: in the order of the streams, and done when it says so."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def in_stream_order(tensor: torch.Tensor, act: Callable[[], T]) -> Callable[[], T]:
    """`act`, for another thread: begins when what the caller has queued on its stream is done, and returns when what
    it queues itself is done. On the CPU `act` itself."""
    if not tensor.is_cuda:
        return act
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensor.device))

    def act_in_order() -> T:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(ready)
            done = act()
            stream.synchronize()
        return done

    return act_in_order
