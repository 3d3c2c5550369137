"""Defines which values a state may contain, and splits a state into a JSON skeleton and a list of tensors.

    null  true  "text"  1  1.5             themselves
    {"i": "-1ffff..."}                     an int beyond 63 bits, in hexadecimal
    {"f": "7ff8000000000000"}              a float that JSON cannot represent: its 8 bytes
    [...]  {"t": [...]}                    list, tuple
    {"d": [[key, value], ...]}             dict; {"c": ...} a Counter, used by MultiStepLR for its milestones
    {"o": [[[key, value], ...], metadata]} OrderedDict, with the `_metadata` attribute that Module.state_dict() sets
    {"q": [[...], maxlen]}                 deque
    {"n": ["float64", 5]}                  NumPy array, sent as tensor number 5
    {"b": 3}  {"y": 4}                     tensor number 3; bytes, sent as tensor number 4. Each occurs exactly once

A skeleton never contains the name of a class or function, so data from a peer is decoded to these values or raises
CorruptState.
"""

import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch

MAX_DEPTH = 64
MAX_DIMENSIONS = 64
MAX_PLAIN_INT = 2**63

State: TypeAlias = Any
"""A tree of dict, list, tuple, deque, str, int, float, bool, None, bytes, torch.Tensor and NumPy arrays."""
Json: TypeAlias = Any

_WITHOUT_BYTES = re.compile(r"q.*|bits.*|u?int[1-7]")
DTYPES: Mapping[str, torch.dtype] = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _WITHOUT_BYTES.fullmatch(name := str(dtype).removeprefix("torch."))
}
"""All dtypes of this torch version, except quantized types, bit fields, and integers smaller than a byte."""

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_OTHER_NUMBERS = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(name) for name in (*_INTEGERS, *_OTHER_NUMBERS)}
"""NumPy dtypes, in the host's byte order, that also exist in torch."""


class CorruptState(Exception):
    """Raised if bytes are not a state that this version can read."""


def disassemble(state: State) -> tuple[Json, list[torch.Tensor]]:
    """Split `state` into a JSON skeleton and the list of its tensors. The tensors are not copied.

    Raises:
        TypeError, ValueError: An entry cannot be encoded, is nested too deeply, or contains itself.
    """
    disassembly = _Disassembly()
    return disassembly.describe(state), disassembly.tensors


def assemble(skeleton: Json, tensors: Sequence[torch.Tensor]) -> State:
    """Rebuild a state from its skeleton and tensors. The skeleton may come from a malicious peer.

    If the tensor of a bytes object or NumPy array is on the meta device, the object becomes empty.

    Raises:
        CorruptState: The skeleton is not valid. No other exception is raised.
    """
    assembly = _Assembly(tensors)
    state = assembly.build(skeleton, 0)
    if assembly.unused:
        raise CorruptState(f"{len(assembly.unused)} tensors belong nowhere in the state")
    return state


def format_path(path: Iterable[object]) -> str:
    """Format a path for an error message: ("optimizer", 0) becomes "state['optimizer'][0]"."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Disassembly:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._path: list[object] = []

    def describe(self, node: object) -> Json:
        if node is None or type(node) is bool or type(node) is str:
            return node
        if type(node) is int:
            return node if abs(node) < MAX_PLAIN_INT else {"i": f"{node:x}"}
        if type(node) is float:
            return node if math.isfinite(node) else {"f": struct.pack(">d", node).hex()}
        if len(self._path) > MAX_DEPTH:
            raise ValueError(f"{self._where()} is nested deeper than {MAX_DEPTH} levels, or contains itself")
        if type(node) is bytes:
            flat = torch.frombuffer(bytearray(node), dtype=torch.uint8) if node else torch.empty(0, dtype=torch.uint8)
            return {"y": self._add(flat)}
        if isinstance(node, torch.Tensor):
            if reason := _unsendable(node):
                raise TypeError(f"{self._where()} is a {_name(node)} {reason}")
            return {"b": self._add(node)}
        if type(node) is np.ndarray and node.dtype.isnative and (name := node.dtype.name) in NUMPY_DTYPES:
            return {"n": [name, self._add(torch.from_numpy(np.array(node)))]}
        return self._container(node)

    def _container(self, node: object) -> Json:
        if type(node) is dict:
            return {"d": self._items(node)}
        if type(node) is OrderedDict:
            return {"o": [self._items(node), self._child("_metadata", getattr(node, "_metadata", None))]}
        if type(node) is Counter:
            return {"c": self._items(node)}
        if type(node) is list:
            return [self._child(index, child) for index, child in enumerate(node)]
        if type(node) is tuple:
            return {"t": [self._child(index, child) for index, child in enumerate(node)]}
        if type(node) is deque:
            return {"q": [[self._child(index, child) for index, child in enumerate(node)], node.maxlen]}
        raise TypeError(f"{self._where()} is a {_name(node)}, which cannot be sent to a peer: {_advice(node)}")

    def _child(self, key: object, child: object) -> Json:
        self._path.append(key)
        described = self.describe(child)
        self._path.pop()
        return described

    def _items(self, node: Mapping[Any, Any]) -> list[Json]:
        return [[self._key(key), self._child(key, child)] for key, child in node.items()]

    def _key(self, key: object) -> Json:
        if not _is_key(key):
            raise TypeError(f"{self._where()} has the key {key!r}, a {_name(key)}: use str, int, or a tuple of those")
        return self._child(key, key)

    def _add(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _where(self) -> str:
        return format_path(self._path)


class _Assembly:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.unused = set(range(len(tensors)))

    def build(self, node: Json, depth: int) -> State:
        if depth > MAX_DEPTH + 1:
            raise CorruptState(f"the state is nested deeper than {MAX_DEPTH} levels")
        match node:
            case None | bool() | str() | int() | float():
                return node
            case list():
                return [self.build(child, depth + 1) for child in node]
            case dict() if len(node) == 1:
                [(tag, body)] = node.items()
                return self._tagged(tag, body, depth + 1)
            case _:
                raise CorruptState("the skeleton of the state holds something that is neither a value nor a container")

    def _tagged(self, tag: str, body: Json, depth: int) -> State:
        match tag, body:
            case "b", int():
                return self._tensor(body)
            case "y", int():
                tensor = self._tensor(body)
                if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
                    raise CorruptState(f"{tensor.dtype} of shape {tuple(tensor.shape)} cannot be bytes")
                return b"" if tensor.is_meta else tensor.numpy().tobytes()
            case "i" | "f", str():
                try:
                    return int(body, 16) if tag == "i" else struct.unpack(">d", bytes.fromhex(body))[0]
                except (ValueError, struct.error) as error:
                    raise CorruptState(f"{body[:40]!r} is not a number") from error
            case "n", [str() as name, int() as index]:
                tensor = self._tensor(index)
                if name not in NUMPY_DTYPES or DTYPES.get(name) is not tensor.dtype:
                    raise CorruptState(f"{tensor.dtype} cannot be an array of {name[:20]!r}")
                return np.empty(0, name) if tensor.is_meta else tensor.numpy()
            case "q", [list() as items, None | int() as maxlen] if (
                maxlen is None or len(items) <= maxlen < MAX_PLAIN_INT
            ):
                return deque((self.build(child, depth) for child in items), maxlen)
            case "t", list():
                return tuple(self.build(child, depth) for child in body)
            case "d", list():
                return self._items(body, depth)
            case "c", list():
                return Counter[Any](self._items(body, depth))
            case "o", [list() as items, metadata]:
                ordered, metadata = OrderedDict(self._items(items, depth)), self.build(metadata, depth)
                if not isinstance(metadata, dict | None):
                    raise CorruptState("the metadata of an OrderedDict is not a dict")
                if metadata is not None:
                    vars(ordered)["_metadata"] = metadata
                return ordered
            case _:
                raise CorruptState(f"the skeleton of the state holds an unknown or malformed element {tag[:20]!r}")

    def _items(self, pairs: list[Json], depth: int) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise CorruptState("a dict of the state holds something that is not a pair of key and value")
            key = self.build(pair[0], depth)
            if not _is_key(key) or key in items:
                raise CorruptState("a dict of the state has a key twice, or one that cannot be a key")
            items[key] = self.build(pair[1], depth)
        return items

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self.unused:
            raise CorruptState(f"the state names tensor {index} twice, or has no such tensor")
        self.unused.remove(index)
        return self._tensors[index]


def _is_key(key: object) -> TypeGuard[str | int | float | bool | tuple[Any, ...] | None]:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (str, int, float, bool)


def _unsendable(tensor: torch.Tensor) -> str | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return "and not a plain tensor: send its .to_local() or .as_subclass(torch.Tensor)"
    if tensor.layout is not torch.strided:
        return f"with layout {tensor.layout}: send its .to_dense()"
    if tensor.device.type == "meta":
        return "on the meta device, without values: materialise it first"
    if tensor.dtype not in DTYPES.values():
        return f"of {tensor.dtype}, whose elements are not whole bytes: send its .dequantize() or a wider dtype"
    if tensor.dim() > MAX_DIMENSIONS:
        return f"of {tensor.dim()} dimensions: send a .reshape() with at most {MAX_DIMENSIONS}"
    return None


def _name(node: object) -> str:
    kind = type(node)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(node: object) -> str:
    if isinstance(node, np.generic):
        return "send its .item()"
    if isinstance(node, np.ndarray):
        return "send torch.from_numpy(array) of numbers"
    if isinstance(node, dict | list | tuple | str | int | float):
        return "send a plain dict, list, tuple, str, int or float made of it"
    return "leave it out of the state, or send the numbers, strings, lists, dicts and tensors it can be rebuilt from"
