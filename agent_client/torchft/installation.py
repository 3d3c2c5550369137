"""Replaces torchft's native classes with ours.

`install` registers a module under the name of torchft's native module, and replaces classes that were already imported.
It also replaces the gradient hook of torchft's DistributedDataParallel (ddp_hook.py).
"""

import importlib
import sys
import types
from collections.abc import Mapping

from agent_client.torchft import clients, servers

NATIVE = "torchft._torchft"
NAMES: Mapping[str, type] = {
    one.__name__: one
    for one in (
        clients.LighthouseClient,
        servers.LighthouseServer,
        clients.ManagerClient,
        servers.ManagerServer,
        clients.Quorum,
        clients.QuorumMember,
        clients.QuorumResult,
        clients.Timestamp,
    )
}


def install() -> None:
    """Make torchft's Python code use our lighthouse and managers. Further calls do nothing.

    Call this before torchft is imported, or at least before one of its objects is created. If torchft has already been
    imported, its native classes are replaced in every module that has imported them.

    Raises:
        ModuleNotFoundError: torchft, or a module that it requires, is not installed.
    """
    native = sys.modules.get(NATIVE)
    if native is not None and getattr(native, "ManagerClient", None) is clients.ManagerClient:
        return
    sys.modules[NATIVE] = ours = types.ModuleType(NATIVE, "torchft's native module, as lighthouse-ft serves it.")
    ours.__dict__.update(NAMES)
    try:
        torchft = importlib.import_module("torchft")
    except ModuleNotFoundError as e:
        del sys.modules[NATIVE]
        needed = "it needs torch and opentelemetry: pip install torchft"
        raise ModuleNotFoundError(f"torchft cannot be imported: {e}; {needed}", name=e.name) from e
    torchft.__dict__["_torchft"] = ours
    if native is not None:
        _replace(native)
    hook = importlib.import_module("agent_client.torchft.ddp_hook").sum_bucket
    importlib.import_module("torchft.ddp").DistributedDataParallel._comm_hook = staticmethod(hook)


def _replace(native: types.ModuleType) -> None:
    """Replace the native classes in every imported module, even if the module uses other names for them."""
    ours_by_id = {id(getattr(native, name)): ours for name, ours in NAMES.items() if hasattr(native, name)}
    for module in [module for module in sys.modules.values() if module is not native]:
        taken = {name: id(value) for name, value in getattr(module, "__dict__", {}).items() if id(value) in ours_by_id}
        for name, identity in taken.items():
            setattr(module, name, ours_by_id[identity])
