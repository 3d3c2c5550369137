"""State trees drawn by hypothesis, and what it means that two are the same, bit by bit."""

import math
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from agent_client.state.codec import decode, encode
from agent_client.state.tree import DTYPES


def encoded(state: Any, chunk_bytes: int = 64) -> bytes:
    return b"".join(encode(state, chunk_bytes=chunk_bytes))


def over_the_wire(state: Any) -> Any:
    return decode(encoded(state))


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # older versions of torch cannot copy float4_e2m1fn_x2
    plain = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def same(one: Any, other: Any) -> bool:
    """Same types, same order of keys, same bits, and clones with the same strides, where a stride says anything."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return False
        strides = {_strides(each) for each in (one, other) if each.numel()}
        return len(strides) < 2 and (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, dict):
        metadata = getattr(one, "_metadata", None), getattr(other, "_metadata", None)
        return same(list(one.items()), list(other.items())) and same(*metadata)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    return one == other


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of a clone, along the dimensions of more than one element."""
    clone = torch.empty_like(tensor, device="meta")
    return tuple(stride for stride, size in zip(clone.stride(), clone.shape, strict=True) if size > 1)


any_text = st.text(st.characters(exclude_categories=()), max_size=6)
numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats()
arrays = st.sampled_from(
    [
        np.arange(6).reshape(2, 3),
        np.arange(6.0)[::-2],
        np.zeros((0, 2), np.float16),
        np.array(True),
        np.ones(2, np.uint16),
    ]
)
scalars = arrays | st.none() | st.booleans() | numbers | any_text | st.binary(max_size=6)
plain_keys = any_text | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
keys = plain_keys | st.tuples(plain_keys, st.tuples(plain_keys))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)  # any other byte becomes 1 in a copy
    flat = torch.frombuffer(raw, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    tensor = flat.clone().view(dtype).reshape(shape)
    return draw(st.sampled_from(LAYOUTS))(tensor)


LAYOUTS = [
    lambda tensor: tensor,
    lambda tensor: tensor.permute(tuple(reversed(range(tensor.dim())))),
    lambda tensor: tensor[::2] if tensor.dim() else tensor,
    lambda tensor: tensor[-1:] if tensor.dim() else tensor,
    lambda tensor: tensor.unsqueeze(0).expand(2, *tensor.shape),
]


def ordered_with_metadata(items: dict[Any, Any], metadata: dict[Any, Any] | None) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(items)
    if metadata is not None:
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.builds(deque, st.lists(children, max_size=3), st.none() | st.integers(3, 2**40))
        | dicts
        | st.builds(ordered_with_metadata, dicts, st.none() | dicts)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    )


trees = st.recursive(scalars | tensors(), containers, max_leaves=12)
