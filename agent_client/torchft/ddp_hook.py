"""Gradient hook for torchft's DistributedDataParallel that tolerates a failed all-reduce.

The hook of torchft 0.2.0 waits for an all-reduce and then asserts that it has a future, but a failed one has none. With
gloo, the loss of a peer during a step would therefore crash every other trainer with an AssertionError. This module
imports torch, so installation.py imports it only when it installs the hook.
"""

from typing import Any

import torch
from torch.distributed import GradBucket
from torch.futures import Future


def sum_bucket(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the replica groups. If that fails, return the bucket as it is.

    `state` is torchft's Manager. It records the failure and votes no, so these gradients are not used.
    """
    work = state.allreduce(bucket.buffer())
    work.wait()
    summed: Future[torch.Tensor] | None = getattr(work.get_future(), "_fut", None)
    if summed is not None:
        return summed
    failed = Future[torch.Tensor]()
    failed.set_result(bucket.buffer())
    return failed
