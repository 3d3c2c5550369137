"""torch's own DistributedDataParallel, its gradients reduced by the Agent, bucket by bucket, beside the backward pass.

torch lays its buckets out anew after a replica's first backward pass. A group that has just come back would then sum
other gradients than its peers: silently, since the lengths agree. `find_unused_parameters` is what keeps torch from
doing so; it is always on here, and static_graph is refused.
"""

from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.nn import parallel

from agent_client.agent import Agent


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Replicates inside the group as torch does, and across replica groups through `agent`."""

    def __init__(self, module: torch.nn.Module, agent: Agent, **options: Any) -> None:
        """`options` are torch's, but for process_group. Raises ValueError for those that move the buckets."""
        for name in ("static_graph", "process_group"):
            if options.get(name):
                raise ValueError(f"{name}: does not go with replica groups that come and go; leave it out")
        options["find_unused_parameters"] = True
        super().__init__(module, process_group=agent.group_for_torch(), **options)
        self.register_comm_hook(agent, _reduce_bucket)


def _reduce_bucket(agent: Agent, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def pass_on(done: Future[torch.Tensor]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            reduced.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            reduced.set_result(done.result())

    agent.all_reduce(bucket.buffer()).add_done_callback(pass_on)
    return reduced
