"""Starts the observation of ranks that have no Agent. Python imports this module before a rank's script.

Its folder is first on PYTHONPATH (guard/client.py). If agent_client is installed, observation begins when the script
creates its first process group (agent_client.observe). Until then this module imports neither torch nor our packages;
torch.distributed is loaded only by the script. The folder contains no other module, so the script cannot import our
modules by accident.
"""

# pyright: basic

import os
import sys

_WATCHED = "torch.distributed.distributed_c10d"


class _Finder:
    """Import hook that wraps the loader of the module _WATCHED when it is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
        return spec


class _Loader:
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if hasattr(module, "init_process_group"):
            module.init_process_group = _observed(module.init_process_group)


def _observed(init_process_group):
    from functools import wraps

    @wraps(init_process_group)
    def observed(*args, **options):
        rank = args[4] if len(args) > 4 else options.get("rank", -1)
        if str(rank) in ("-1", os.environ.get("RANK")):  # skip other processes that the script starts
            _observe()
        return init_process_group(*args, **options)

    return observed


def _observe() -> None:
    """Start observing this rank. Print a warning instead of raising an error, so the script continues."""
    try:
        from agent_client.step.observer import observe

        observe()
    except Exception as e:  # noqa: BLE001
        if not (isinstance(e, ModuleNotFoundError) and e.name == "agent_client"):
            print(f"WARNING: lighthouse does not see this rank's collectives: {e!r}", file=sys.stderr, flush=True)


def _import_next() -> None:
    """Import the user's own sitecustomize module, if any, which this module shadows."""
    own_module, own_folder = sys.modules.pop(__name__), os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own_folder]
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own_module)


sys.meta_path.insert(0, _Finder())
_import_next()
