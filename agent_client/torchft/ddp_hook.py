"""A hook for torchft's DistributedDataParallel that outlives a failed sum. torch is imported here.

torchft 0.2.0's own waits for the sum and then asserts that there is a future, which is missing where the sum failed:
with gloo, a peer that dies in the middle of a step ends every other trainer by an AssertionError.
"""

from typing import Any

import torch
from torch.distributed import GradBucket
from torch.futures import Future


def sum_bucket(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """`state` is torchft's Manager. It knows of a failure, and votes no: what is in the bucket then is not used."""
    work = state.allreduce(bucket.buffer())
    work.wait()
    summed: Future[torch.Tensor] | None = getattr(work.get_future(), "_fut", None)
    if summed is not None:
        return summed
    failed = Future[torch.Tensor]()
    failed.set_result(bucket.buffer())
    return failed
