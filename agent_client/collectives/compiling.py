"""torch.compile: what it must leave alone.

torch's C++ code calls back into Python in the middle of a compiled region: a process group's collectives, the hook of a
backward pass. Each such call is a frame that dynamo would trace. Entering a step, a collective or a vote is no part of
a graph, and what surrounds it is compiled as before.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Neither `function` nor what it calls. Imports dynamo when first called, as torch's optimizers do."""
    disabled: Any = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateUsage]
    return disabled


def not_itself_compiled(function: Function) -> Function:
    """Not `function`, but what it calls: the script's module, the optimizer's step."""
    disabled: Any = torch._disable_dynamo(function, recursive=False)  # pyright: ignore[reportPrivateUsage]
    return disabled
