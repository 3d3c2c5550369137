"""Sharded tensors (DTensor) in a state: each rank sends its own shard, with a description of how it lies in the whole.

    {"shard": tensor, "shape": (8, 4), "stride": (4, 1), "mesh": 0, "placements": (("shard", 0),)}

Meshes have numbers, by their order among the parameters: every replica group builds the same model and optimizer.
Without sharded parameters everything passes through as it is.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from agent_client.state.tree import CorruptState, State

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEYS = {"shard", "shape", "stride", "mesh", "placements"}


class Shards:
    """What is needed to take shards out of a state and to put a peer's in their place."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer holds the sharded ones always; a model after a forward pass of FSDP's maybe gathered ones."""
        sharded: list[Any] = [parameter for parameter in parameters if is_sharded(parameter)]
        self._meshes: list[DeviceMesh] = list(dict.fromkeys(parameter.device_mesh for parameter in sharded))

    def __bool__(self) -> bool:
        return bool(self._meshes)

    def take_out(self, state: State) -> State:
        """`state` with this rank's shards, which are not copied. TypeError: laid out in a way that cannot be sent."""
        return _map(state, is_sharded, self._describe)

    def put_back(self, state: State) -> State:
        """The inverse. CorruptState if a description fits nothing here."""
        return _map(state, is_description, self._rebuild)

    def place(self, description: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and offset of this rank's shard of a tensor. CorruptState if the description fits no mesh."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        try:
            mesh = self._meshes[description["mesh"]]
            placements = [_placement(*words) for words in description["placements"]]
            if len(placements) != mesh.ndim:
                raise ValueError(f"it is laid out over {len(placements)} dimensions of a mesh that has {mesh.ndim}")
            return compute_local_shape_and_global_offset(torch.Size(description["shape"]), mesh, placements)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise CorruptState(f"the state has a shard that does not belong to this rank: {e}") from e

    def _describe(self, tensor: "DTensor") -> State:
        if tensor.device_mesh not in self._meshes:
            raise TypeError(f"a tensor is sharded over {tensor.device_mesh}, over which no parameter is")
        with torch.no_grad():
            return {
                "shard": tensor.to_local(),
                "shape": tuple(tensor.shape),
                "stride": tensor.stride(),
                "mesh": self._meshes.index(tensor.device_mesh),
                "placements": tuple(_words(placement) for placement in tensor.placements),
            }

    def _rebuild(self, description: dict[str, Any]) -> "DTensor":
        from torch.distributed.tensor import DTensor

        try:
            mesh = self._meshes[description["mesh"]]
            placements = [_placement(*words) for words in description["placements"]]
            shape, stride = torch.Size(description["shape"]), tuple(description["stride"])
            return DTensor.from_local(description["shard"], mesh, placements, shape=shape, stride=stride)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise CorruptState(f"the received state has a shard that does not belong to this rank: {e}") from e


def is_sharded(node: object) -> bool:
    """Imports torch's module, which takes a second, only where there may be such a tensor: so do all functions here."""
    if not isinstance(node, torch.Tensor) or type(node) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(node, DTensor)


def is_description(node: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and node.keys() == _KEYS


def without_descriptions(state: State) -> State:
    """Return `state` with the tensor itself for each description, whose shard is the whole tensor."""
    return _map(state, is_description, lambda description: description["shard"])


def _words(placement: Any) -> tuple[str | int, ...]:
    if placement.is_replicate():
        return ("replicate",)
    factor = getattr(placement, "split_factor", None)  # tensor parallelism under FSDP
    if factor is not None:
        return ("strided shard", placement.dim, factor)
    if placement.is_shard():
        return ("shard", placement.dim)
    raise TypeError(f"a tensor laid out as {placement} cannot be sent: only shards and replicas can")


def _placement(kind: str, *numbers: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard, placement_types

    match kind, numbers:
        case "replicate", ():
            return Replicate()
        case "shard", (int(dim),):
            return Shard(dim)
        case "strided shard", (int(dim), int(factor)):
            return placement_types._StridedShard(dim, split_factor=factor)  # pyright: ignore[reportPrivateUsage]
        case _:
            raise ValueError(f"{kind!r} is not a placement")


def _map(node: State, is_one: Callable[[object], bool], change: Callable[[Any], State]) -> State:
    """`node` with `change` applied to what `is_one` finds; containers are made anew."""
    if is_one(node):
        return change(node)
    if type(node) in (dict, OrderedDict, Counter):
        mapped = type(node)({key: _map(child, is_one, change) for key, child in node.items()})
        if type(node) is OrderedDict:
            vars(mapped).update(vars(node))  # the `_metadata` of Module.state_dict()
        return mapped
    if type(node) in (list, tuple):
        children: Sequence[State] = [_map(child, is_one, change) for child in node]
        return type(node)(children)
    return node
