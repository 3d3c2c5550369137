"""Detects whether tensors of a model were replaced. The comparison runs in C: a walk in Python takes milliseconds."""

from itertools import chain
from operator import is_, methodcaller

from torch import nn

_VALUES = methodcaller("values")  # the dicts of a ScriptModule are not dicts


class ModuleTree:
    """The submodules of a module, and their tensors of one kind."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        """Remember the tree as it is now. `kind` is "_parameters" or "_buffers"."""
        self._module = module
        self._kind = kind
        self._remember()

    def has_changed(self) -> bool:
        """Return whether a submodule or a tensor was added, removed or replaced since the last call."""
        now = self._contents()
        if len(now) == len(self._known) and all(map(is_, now, self._known)):
            return False
        self._remember()
        return True

    def _remember(self) -> None:
        kinds = ("_modules", self._kind)
        self._dicts = [getattr(module, kind) for module in self._module.modules() for kind in kinds]
        self._known = self._contents()

    def _contents(self) -> list[object]:
        return list(chain.from_iterable(map(_VALUES, self._dicts)))
