"""A process group of torch's whose collectives are marked: where the rank is, while it is in one, others can see.

torch's modules run collectives of their own inside a replica group: DDP sends its buffers before each forward pass.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agent_client.collectives.compiling import never_compiled
from agent_client.progress.progress import Progress

_COLLECTIVES = {
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "barrier",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "scatter": "scatter",
}
_OTHERS = ("recv", "recv_anysource", "send")


class ObservedGroup(ProcessGroup):
    """Does what `ranks` does."""

    def __init__(self, ranks: ProcessGroup, progress: Progress) -> None:
        super().__init__(ranks.rank(), ranks.size())  # pyright: ignore[reportCallIssue]
        self.ranks: Any = ranks
        self.progress = progress
        this: Any = self
        kind, cpu = ProcessGroup.BackendType.GLOO, torch.device("cpu")
        this._set_default_backend(kind)
        this._register_backend(cpu, kind, self.ranks._get_backend(cpu))
        this._set_group_name(self.ranks.group_name)

    def observe(self, method: str, *args: Any, **options: Any) -> Any:
        entered = self.progress.torchs(_COLLECTIVES[method], _shape(args))
        work = None
        try:
            work = getattr(self.ranks, method)(*args, **options)
        finally:
            entered.runs(work)
        return work


def first_tensor(args: tuple[Any, ...]) -> Tensor | None:
    """Of a collective's."""
    first: object = args
    while isinstance(first, list | tuple) and first:
        first = cast("Any", first)[0]
    return first if isinstance(first, Tensor) else None


def _shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    tensor = first_tensor(args)
    return () if tensor is None else tuple(tensor.shape)


def _observed(method: str) -> Callable[..., Any]:
    return never_compiled(lambda self, *args, **options: self.observe(method, *args, **options))


def _passed_on(method: str) -> Callable[..., Any]:
    return never_compiled(lambda self, *args, **options: getattr(self.ranks, method)(*args, **options))


for _method in _COLLECTIVES:
    setattr(ObservedGroup, _method, _observed(_method))
for _method in _OTHERS:
    setattr(ObservedGroup, _method, _passed_on(_method))
