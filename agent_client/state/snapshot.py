"""A copy of a state to serve while training goes on, and the check before a received state is installed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from agent_client.state.host_memory import copy_of
from agent_client.state.tree import State, assemble, disassemble, format_path

MAX_NAMED = 10


class StateMismatch(Exception):
    """A received state does not fit the local one. Nothing local was touched.

    `difference`: the first one, in one line; empty where the structure is not what differs.
    """

    def __init__(self, message: str, difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference


def snapshot(state: State) -> State:
    """A deep copy that shares nothing with `state`: tensors detached, on the CPU, with their own memory.

    TypeError and ValueError as `disassemble`.
    """
    skeleton, tensors = disassemble(state)
    return assemble(skeleton, [copy_of(tensor.detach()) for tensor in tensors])


def size_bytes(state: State) -> int:
    """What a copy of it would take."""
    return sum(tensor.nbytes for tensor in disassemble(state)[1])


def install_matches(expected: State, received: State) -> None:
    """StateMismatch, with the paths, unless `received` has the structure of `expected`, the local state.

    Compared are the keys of dicts, the lengths of sequences, the shapes and dtypes of tensors; never values, and a
    sequence of plain values is a value. Where `expected` has None or an empty container everything fits: an optimizer
    has no state before its first step.
    """
    differences = [f"{format_path(path)}: {what}" for path, what in _differences(expected, received, ())]
    if differences:
        unnamed = len(differences) - 1
        more = f", and {unnamed} more" if unnamed else ""
        raise StateMismatch(_report(differences), differences[0] + more)


def _report(differences: Sequence[str]) -> str:
    unnamed = len(differences) - MAX_NAMED
    more = [f"and {unnamed} more"] if unnamed > 0 else []
    lines = "".join(f"\n  {line}" for line in [*differences[:MAX_NAMED], *more])
    return (
        f"the received state does not match the local one, which was not changed:{lines}\n"
        "Every replica group must build the same model and optimizer: compare their configurations and versions."
    )


Path = tuple[object, ...]
Difference = tuple[Path, str]


def _differences(expected: State, received: State, path: Path) -> Iterator[Difference]:
    here, there = _kind(expected), _kind(received)
    if expected is None or (here in ("dict", "sequence") and not expected):
        return
    if here != there:
        yield path, f"{here} here, {there} received"
    elif here == "dict":
        yield from _dict_differences(expected, received, path)
    elif here == "sequence":
        yield from _sequence_differences(expected, received, path)
    elif here == "tensor":
        yield from _tensor_differences(expected, received, path)


def _dict_differences(expected: Mapping[Any, Any], received: Mapping[Any, Any], path: Path) -> Iterator[Difference]:
    for key, child in expected.items():
        if key in received:
            yield from _differences(child, received[key], (*path, key))
        else:
            yield (*path, key), "missing in what was received"
    yield from (((*path, key), "received, but unknown here") for key in received if key not in expected)


def _sequence_differences(expected: Sequence[Any], received: Sequence[Any], path: Path) -> Iterator[Difference]:
    if _is_plain(expected) and _is_plain(received):
        return
    if len(expected) != len(received):
        yield path, f"{len(expected)} elements here, {len(received)} received"
    for index, (child, other) in enumerate(zip(expected, received, strict=False)):
        yield from _differences(child, other, (*path, index))


def _tensor_differences(expected: torch.Tensor, received: torch.Tensor, path: Path) -> Iterator[Difference]:
    if expected.shape != received.shape:
        yield path, f"shape {tuple(expected.shape)} here, {tuple(received.shape)} received"
    if expected.dtype != received.dtype:
        yield path, f"{expected.dtype} here, {received.dtype} received"


def _kind(node: object) -> str:
    if isinstance(node, torch.Tensor):
        return "tensor"
    if isinstance(node, Mapping):
        return "dict"
    return "sequence" if isinstance(node, list | tuple) else "value"


def _is_plain(nodes: Sequence[object]) -> bool:
    return all(_kind(node) == "value" for node in nodes)
