"""Replaces sharded tensors (DTensor) in a state with *descriptions*: a rank's shard and its position in the tensor.

    {"shard": tensor, "shape": (8, 4), "stride": (4, 1), "mesh": 0, "placements": (("shard", 0),)}

Meshes are numbered in the order in which the parameters use them, which is the same in every replica group, because all
groups build the same model and optimizer. A state without sharded parameters is returned unchanged.

torch's DTensor module takes a second to import, so it is imported only when a state may contain such a tensor.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from agent_client.state.tree import CorruptState, State

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEYS = {"shard", "shape", "stride", "mesh", "placements"}


class Shards:
    """Replaces sharded tensors in a state with descriptions (dicts that contain this rank's shard), and vice versa."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find the device meshes over which the parameters are sharded.

        Pass the parameters of both model and optimizer: after an FSDP forward pass, the model's may be unsharded.
        """
        sharded: list[Any] = [parameter for parameter in parameters if is_sharded(parameter)]
        self._meshes: list[DeviceMesh] = list(dict.fromkeys(parameter.device_mesh for parameter in sharded))

    def __bool__(self) -> bool:
        return bool(self._meshes)

    def describe(self, state: State) -> State:
        """Return `state` with a description in place of each sharded tensor. Tensors are not copied."""
        return _map(state, is_sharded, self._describe)

    def rebuild(self, state: State) -> State:
        """Return `state` with a DTensor in place of each description. Raise CorruptState if one is invalid."""
        return _map(state, is_description, self._rebuild)

    def place(self, description: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of this rank's shard of a described tensor, and its offset in the whole tensor."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        with self._layout(description) as (mesh, placements, shape):
            if len(placements) != mesh.ndim:
                raise ValueError(f"it is laid out over {len(placements)} dimensions of a mesh that has {mesh.ndim}")
            return compute_local_shape_and_global_offset(shape, mesh, placements)

    def _describe(self, tensor: "DTensor") -> State:
        if tensor.device_mesh not in self._meshes:
            raise TypeError(f"a tensor is sharded over {tensor.device_mesh}, over which no parameter is")
        with torch.no_grad():
            return {
                "shard": tensor.to_local(),
                "shape": tuple(tensor.shape),
                "stride": tensor.stride(),
                "mesh": self._meshes.index(tensor.device_mesh),
                "placements": tuple(_placement_fields(placement) for placement in tensor.placements),
            }

    def _rebuild(self, description: dict[str, Any]) -> "DTensor":
        from torch.distributed.tensor import DTensor

        with self._layout(description) as (mesh, placements, shape):
            stride = tuple(description["stride"])
            return DTensor.from_local(description["shard"], mesh, placements, shape=shape, stride=stride)

    @contextmanager
    def _layout(self, description: dict[str, Any]) -> Generator[tuple[DeviceMesh, list[Any], torch.Size]]:
        """Yield mesh, placements and shape of a described tensor. Errors in the `with` block become CorruptState."""
        try:
            placements = [_placement(*fields) for fields in description["placements"]]
            yield self._meshes[description["mesh"]], placements, torch.Size(description["shape"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
            raise CorruptState(f"the state has a shard that does not belong to this rank: {e}") from e


def is_sharded(node: object) -> bool:
    if not isinstance(node, torch.Tensor) or type(node) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(node, DTensor)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard if `tensor` is sharded, or else `tensor`."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor


def like_parameter(local: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return `local` on the parameter's device or, for a sharded parameter, a DTensor with `local` as the shard."""
    if not is_sharded(parameter):
        return local.to(parameter.device)
    sharded: Any = torch.empty_like(parameter)
    sharded.to_local().copy_(local)
    return sharded


def is_description(node: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and node.keys() == _KEYS


def without_descriptions(state: State) -> State:
    """Return `state` with each description replaced by its shard. Each shard must contain the whole tensor."""
    return _map(state, is_description, lambda description: description["shard"])


def _placement_fields(placement: Any) -> tuple[str | int, ...]:
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
    """Return a copy of the tree in which `change` replaces each node for which `is_one` returns True."""
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
