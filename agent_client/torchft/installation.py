"""Our classes in the places of torchft's native ones."""

import importlib
import sys
import types
from collections.abc import Mapping

from agent_client.torchft import clients, servers
from agent_client.torchft import clients as results

NATIVE = "torchft._torchft"
NAMES: Mapping[str, type] = {
    one.__name__: one
    for one in (
        clients.LighthouseClient,
        servers.LighthouseServer,
        clients.ManagerClient,
        servers.ManagerServer,
        results.Quorum,
        results.QuorumMember,
        results.QuorumResult,
        results.Timestamp,
    )
}


def install() -> None:
    """From now on torchft's Python runs on our control plane; more than once does no harm.

    Best before torchft is imported, and at any rate before the first of its objects is made. Where torchft has been
    imported, every module that holds one of its native classes gets ours instead. Raises ModuleNotFoundError that says
    what is missing.
    """
    native = sys.modules.get(NATIVE)
    if native is not None and getattr(native, "ManagerClient", None) is clients.ManagerClient:
        return
    sys.modules[NATIVE] = ours = _module()
    try:
        torchft = importlib.import_module("torchft")
    except ModuleNotFoundError as e:
        del sys.modules[NATIVE]
        needed = "it needs torch and opentelemetry: pip install torchft"
        raise ModuleNotFoundError(f"torchft cannot be imported: {e}; {needed}", name=e.name) from e
    torchft.__dict__["_torchft"] = ours
    if native is not None:
        _replace(native)
    _mend_ddp()


def _module() -> types.ModuleType:
    module = types.ModuleType(NATIVE, "torchft's native module, as lighthouse-ft serves it.")
    module.__dict__.update(NAMES)
    return module


def _replace(native: types.ModuleType) -> None:
    """In every module, under whatever name it has taken them."""
    ours_by_id = {id(getattr(native, name)): ours for name, ours in NAMES.items() if hasattr(native, name)}
    for module in [module for module in sys.modules.values() if module is not native]:
        taken = {name: id(value) for name, value in getattr(module, "__dict__", {}).items() if id(value) in ours_by_id}
        for name, identity in taken.items():
            setattr(module, name, ours_by_id[identity])


def _mend_ddp() -> None:
    """ddp_hook.py says why."""
    hook = importlib.import_module("agent_client.torchft.ddp_hook").sum_bucket
    importlib.import_module("torchft.ddp").DistributedDataParallel._comm_hook = staticmethod(hook)
