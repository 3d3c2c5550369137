"""A torch process group that records its collectives in the rank's progress, and decorators against torch.compile.

torch's modules run their own collectives inside a replica group: DDP broadcasts its buffers before each forward pass.
`ObservedGroup` records these collectives, so that a rank that hangs in one of them is noticed.

torch's C++ code calls back into Python in the middle of a compiled region, for the collectives of a process group and
for hooks of the backward pass. Dynamo would trace these calls, but code that begins a step, a collective or a vote must
not become part of a graph. `never_compiled` excludes such functions. The code around them is still compiled.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agent_client.progress.progress import Progress

Function = TypeVar("Function", bound=Callable[..., Any])
TORCHS_FRAMES = ("torch._compile", "torch._dynamo.")


def never_compiled(function: Function) -> Function:
    """Exclude `function` and everything it calls from torch.compile. The first call imports dynamo."""
    return _disabled(function, recursive=True)


def not_itself_compiled(function: Function) -> Function:
    """Exclude `function` from torch.compile, but not the functions it calls, such as the script's module."""
    return _disabled(function, recursive=False)


def _disabled(function: Function, *, recursive: bool) -> Function:
    disabled: Any = torch._disable_dynamo(function, recursive=recursive)  # pyright: ignore[reportPrivateUsage]

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return disabled(*args, **options)
        except BaseException as error:
            _leave_out_torchs_frames(error)
            raise

    undeclared: Any = call
    return undeclared


def _leave_out_torchs_frames(error: BaseException) -> None:
    """Remove torch's wrapper frames from the traceback, because they distract from the error."""
    here = error.__traceback__
    inner = here and here.tb_next
    while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(TORCHS_FRAMES):
        inner = inner.tb_next
    if here is not None and inner is not None:
        here.tb_next = inner


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
    """Process group that forwards every call to the group `ranks` and records collectives in `progress`."""

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
        tensor = first_tensor(args)
        shape = () if tensor is None else tuple(tensor.shape)
        entered = self.progress.enter_torch_collective(_COLLECTIVES[method], shape)
        work = None
        try:
            work = getattr(self.ranks, method)(*args, **options)
        finally:
            entered.runs(work)
        return work


def first_tensor(args: tuple[Any, ...]) -> Tensor | None:
    first: object = args
    while isinstance(first, list | tuple) and first:
        first = cast("Any", first)[0]
    return first if isinstance(first, Tensor) else None


def _observed(method: str) -> Callable[..., Any]:
    return never_compiled(lambda self, *args, **options: self.observe(method, *args, **options))


def _passed_on(method: str) -> Callable[..., Any]:
    return never_compiled(lambda self, *args, **options: getattr(self.ranks, method)(*args, **options))


for _method in _COLLECTIVES:
    setattr(ObservedGroup, _method, _observed(_method))
for _method in _OTHERS:
    setattr(ObservedGroup, _method, _passed_on(_method))
