"""torch's DistributedDataParallel, its gradients reduced by the Agent, bucket by bucket, beside the backward pass.

torch lays its buckets out anew after a replica's first backward pass, in the order of that pass. A group that has just
come back would then sum other gradients than its peers: silently, since the lengths agree. Here they are laid out once,
before the first pass, last parameter first; what moves or leaves out buckets is refused.

With `find_unused_parameters` torch leaves the gradient of a parameter that no rank used as it was, mostly None, and
asks its process group who used which. All replica groups must agree on that as they do on the sums, so they are asked.
"""

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import GradBucket
from torch.nn import parallel

from agent_client.agent import Agent
from agent_client.process_group.observed import ObservedGroup
from agent_client.salvage import Salvage


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Replicates inside the group as torch does, and across replica groups through `agent`."""

    def __init__(self, module: torch.nn.Module, agent: Agent, *, salvage: bool = False, **options: Any) -> None:
        """`salvage`: a step that loses a peer is committed with the survivors' gradients, without computing them again,
        for the memory of one more set. `options` are torch's, but for process_group.

        Raises ValueError for those that move or leave out buckets.
        """
        for name in ("static_graph", "process_group", "skip_all_reduce_unused_params"):
            if options.get(name):
                raise ValueError(f"{name}: does not go with replica groups that come and go; leave it out")
        group = _GroupAmongGroups(agent)
        super().__init__(module, process_group=group, **options)
        group.parameters, _ = self._build_params_for_reducer()
        self._lay_out_buckets()
        self.salvage = Salvage(agent, group.parameters) if salvage else None
        if self.salvage is not None:
            group.salvage = self.salvage
            agent.salvage_by(self.salvage.reduce_again)
        self.register_comm_hook((agent, self.salvage), _reduce_bucket)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """In the order of the buckets. Where torch looks for unused ones, it turns that order itself."""
        parameters, are_sparse = super()._build_params_for_reducer()
        return (parameters, are_sparse) if self.find_unused_parameters else (parameters[::-1], are_sparse[::-1])

    def _lay_out_buckets(self) -> None:
        """What torch does after a first backward pass, and once only; never where it looks for unused parameters."""
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()


class _GroupAmongGroups(ObservedGroup):
    """The ranks of this replica group; but torch's own all-reduce goes over all replica groups.

    That is the one of the map of used parameters: all else that torch all-reduces goes through the hook.
    """

    def __init__(self, agent: Agent) -> None:
        observed = agent.group_for_torch()
        super().__init__(observed.ranks, observed.progress)
        self.agent = agent
        self.parameters: list[torch.nn.Parameter] = []  # in the order of the map
        self.salvage: Salvage | None = None

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sets the map to 1 where any rank used the parameter, and its gradient counts."""
        [used] = tensors
        here = used.bool()
        if self.salvage is not None:
            self.salvage.keep_used(used.float())
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        # torch queues its own end of the backward pass when this returns; what that end queues comes after it.
        engine.queue_callback(lambda: engine.queue_callback(lambda: self._forget(here & ~used.bool())))
        marked = _reduce(self.agent, used.float()).then(lambda mean: [used.copy_(mean.value() > 0)])
        return c10d._create_work_from_future(marked)  # pyright: ignore[reportAttributeAccessIssue]

    def _forget(self, uncounted: Tensor) -> None:
        """A group that heals counts for nothing: what only it used has no gradient in the others, so none here."""
        for parameter, is_uncounted in zip(self.parameters, uncounted.tolist(), strict=True):
            if is_uncounted:
                parameter.grad = None


def _reduce_bucket(state: tuple[Agent, Salvage | None], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    agent, salvage = state
    if salvage is not None:
        salvage.keep_bucket(bucket)
    return _reduce(agent, bucket.buffer())


def _reduce(agent: Agent, tensor: Tensor) -> torch.futures.Future[Tensor]:
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()

    def pass_on(done: Future[Tensor]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            reduced.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            reduced.set_result(done.result())

    agent.all_reduce(tensor).add_done_callback(pass_on)
    return reduced
