"""Replaces torchft's native module with one that uses our daemons. The import requires neither torch nor torchft.

    from agent_client.torchft import install
    install()

After that, torchft's Manager, Optimizer, DistributedDataParallel, LocalSGD and DiLoCo, and so all scripts that use
these classes, use our lighthouse and managers.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from agent_client.torchft.clients import LighthouseClient, ManagerClient, Quorum, QuorumMember, QuorumResult, Timestamp
from agent_client.torchft.servers import LighthouseServer, ManagerServer

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
    "install",
]

_NATIVE = "torchft._torchft"


def install() -> None:
    """Make torchft's Python code use our lighthouse and managers. Further calls do nothing.

    Call this before torchft is imported, or at least before an object of torchft is created. If torchft has already
    been imported, its native classes are replaced in every module that has imported them. The gradient hook of
    torchft's DistributedDataParallel is also replaced.

    Raises:
        ModuleNotFoundError: torchft, or a module that it requires, is not installed.
    """
    native = sys.modules.get(_NATIVE)
    if native is not None and getattr(native, "ManagerClient", None) is ManagerClient:
        return
    sys.modules[_NATIVE] = ours = types.ModuleType(_NATIVE, "torchft's native module, as lighthouse-ft serves it.")
    classes = {name: globals()[name] for name in __all__ if name != "install"}
    vars(ours).update(classes)
    try:
        torchft = importlib.import_module("torchft")
    except ModuleNotFoundError as e:
        del sys.modules[_NATIVE]
        needed = "it needs torch and opentelemetry: pip install torchft"
        raise ModuleNotFoundError(f"torchft cannot be imported: {e}; {needed}", name=e.name) from e
    vars(torchft)["_torchft"] = ours
    if native is not None:
        # Other modules may have imported the native classes, even under other names.
        ours_by_id = {id(getattr(native, name)): ours for name, ours in classes.items() if hasattr(native, name)}
        for module in [module for module in sys.modules.values() if module is not native]:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in ours_by_id:
                    setattr(module, name, ours_by_id[id(value)])
    importlib.import_module("torchft.ddp").DistributedDataParallel._comm_hook = staticmethod(_tolerant_hook())


def _tolerant_hook() -> Callable[..., Any]:
    """Return a gradient hook for torchft's DistributedDataParallel that tolerates a failed all-reduce.

    The hook of torchft 0.2.0 asserts that an all-reduce has a future, but a failed all-reduce has none. With gloo, the
    loss of a peer during a step would therefore crash every other trainer.
    """
    import torch
    from torch.distributed import GradBucket
    from torch.futures import Future

    def sum_bucket(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:  # torch checks these annotations
        work = state.allreduce(bucket.buffer())  # by torchft's Manager, which votes no if it fails
        work.wait()
        summed: Future[torch.Tensor] | None = getattr(work.get_future(), "_fut", None)
        if summed is None:
            summed = Future()
            summed.set_result(bucket.buffer())
        return summed

    return sum_bucket
