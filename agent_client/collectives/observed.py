"""A process group of torch's whose collectives are marked: where the rank is, while it is in one, others can see.

torch's modules run collectives of their own inside a replica group: DDP sends its buffers before each forward pass.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agent_client.progress.progress import Progress

# -- compiling ----------------------------------------------------------------
#
# torch.compile: what it must leave alone.
#
# torch's C++ code calls back into Python in the middle of a compiled region: a process group's collectives, the hook
# of a backward pass. Each such call is a frame that dynamo would trace. Entering a step, a collective or a vote is no
# part of a graph, and what surrounds it is compiled as before.

Function = TypeVar("Function", bound=Callable[..., Any])
TORCHS_FRAMES = ("torch._compile", "torch._dynamo.")


def never_compiled(function: Function) -> Function:
    """Neither `function` nor what it calls. Imports dynamo when first called, as torch's optimizers do."""
    return _disabled(function, recursive=True)


def not_itself_compiled(function: Function) -> Function:
    """Not `function`, but what it calls: the script's module, the optimizer's step."""
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
    """Between the caller and the function a traceback shows two frames of torch that say nothing of the error."""
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
