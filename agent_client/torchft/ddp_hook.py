"""Gradient hook for torchft's DistributedDataParallel that survives a failed sum.

The hook of torchft 0.2.0 waits for a sum and then asserts that a future exists, which a failed sum does not have. With
gloo, a peer that dies in the middle of a step would end every other trainer with an AssertionError. This module imports
torch, so installation.py imports it only when it installs the hook.
"""

from typing import Any

import torch
from torch.distributed import GradBucket
from torch.futures import Future


def sum_bucket(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket, and survive a failed sum.

    torchft's Manager in `state` records the failure and votes no, so the content of the bucket is then not used.
    """
    work = state.allreduce(bucket.buffer())
    work.wait()
    summed: Future[torch.Tensor] | None = getattr(work.get_future(), "_fut", None)
    if summed is not None:
        return summed
    failed = Future[torch.Tensor]()
    failed.set_result(bucket.buffer())
    return failed
