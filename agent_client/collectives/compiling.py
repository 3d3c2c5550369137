"""torch.compile: what it must leave alone.

torch's C++ code calls back into Python in the middle of a compiled region: a process group's collectives, the hook of a
backward pass. Each such call is a frame that dynamo would trace. Entering a step, a collective or a vote is no part of
a graph, and what surrounds it is compiled as before.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

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
