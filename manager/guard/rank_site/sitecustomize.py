"""Observation of ranks without an Agent. Python imports this module before a rank's script.

Its folder is first on PYTHONPATH (guard/client.py). When the script creates its first process group, the rank is
observed from then on (agent_client.observe), if agent_client is installed. Before that the module imports neither torch
nor our packages; only the script loads torch.distributed. The folder contains no other module, so the ranks'
interpreter finds none of our modules there.
"""

# pyright: basic

import os
import sys

_WATCHED = "torch.distributed.distributed_c10d"


class _Finder:
    """Import hook that replaces the loader of one module, for its first import."""

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
        if str(rank) in ("-1", os.environ.get("RANK")):  # not in other processes of the script
            _observe()
        return init_process_group(*args, **options)

    return observed


def _observe() -> None:
    """Observe this rank. An error never stops the script."""
    try:
        from agent_client.step.observer import observe

        observe()
    except Exception as e:  # noqa: BLE001
        if not (isinstance(e, ModuleNotFoundError) and e.name == "agent_client"):
            print(f"WARNING: lighthouse does not see this rank's collectives: {e!r}", file=sys.stderr, flush=True)


def _import_next() -> None:
    """Import the sitecustomize that this module shadows."""
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
