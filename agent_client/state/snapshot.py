"""Copies a state, and checks a received state before it is installed.

Large tensors are copied into huge pages if the system supports them. With normal pages, every 4 KiB cause a page fault,
and for a state of gigabytes, the faults take longer than the copy itself.
"""

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence

import torch

from agent_client.state.tree import State, assemble, disassemble, format_path

HUGE_PAGE_BYTES = 2 * 2**20


def empty_bytes(size: int) -> torch.Tensor:
    """Return an uninitialized uint8 CPU tensor of shape (size,). The system provides memory only as it is written."""
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot allocate {size} bytes: {error}") from error
    with contextlib.suppress(OSError):  # the kernel may not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in separate CPU memory. `tensor` must not require a gradient."""
    if tensor.itemsize == 1 and tensor.dtype is not torch.uint8:  # older versions of torch cannot copy float4_e2m1fn_x2
        return copy_of(tensor.view(torch.uint8)).view(tensor.dtype)
    if tensor.nbytes < HUGE_PAGE_BYTES or tensor.is_conj() or tensor.is_neg():
        return tensor.to("cpu", copy=True)
    copied = empty_bytes(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, kept_strides(tensor))
    return copied.copy_(tensor)


def kept_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides for a copy of `tensor`, with the same order of dimensions, but without gaps or overlaps.

    Fused optimizers work in memory order, so a parameter and its optimizer state must have the same order of
    dimensions, such as channels_last.
    """
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` with its dimensions sorted by `kept_strides`, from large to small."""
    strides = kept_strides(tensor)
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


MAX_NAMED = 10


class StateMismatch(Exception):
    """Raised if a received state does not match the local one. The local state is unchanged."""

    def __init__(self, message: str, difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference
        """First structural difference, as one line, or an empty string if the structures are equal."""


class DoesNotFit(StateMismatch):
    """Raised if a received state does not match the local model or optimizer.

    A retry with another peer would not help.
    """


def snapshot(state: State) -> State:
    """Return a deep copy that shares nothing with `state`: detached tensors on the CPU with separate memory."""
    skeleton, tensors = disassemble(state)
    return assemble(skeleton, [copy_of(tensor.detach()) for tensor in tensors])


def size_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in disassemble(state)[1])


def install_matches(expected: State, received: State) -> None:
    """Check that `received` has the same structure as `expected`, the local state.

    The check compares the keys of dicts, the lengths of sequences, and the shapes and dtypes of tensors. It does not
    compare values, and treats a sequence of plain values as a value. None or an empty container in `expected` matches
    anything, because an optimizer has no state before its first step.

    Raises:
        DoesNotFit: The structures differ. The message lists the paths that differ.
    """
    found = [f"{format_path(path)}: {what}" for path, what in _differences(expected, received, ())]
    if not found:
        return
    lines = [*found[:MAX_NAMED], f"and {len(found) - MAX_NAMED} more"][: len(found)]
    raise DoesNotFit(
        "\n  ".join(["the received state does not match the local one, which was not changed:", *lines])
        + "\nEvery replica group must build the same model and optimizer: compare their configurations and versions.",
        found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
    )


Path = tuple[object, ...]


def _differences(expected: State, received: State, path: Path) -> Iterator[tuple[Path, str]]:
    here, there = _kind(expected), _kind(received)
    if expected is None or (here in ("dict", "sequence") and not expected):
        return
    if here != there:
        yield path, f"{here} here, {there} received"
    elif here == "dict":
        for key, child in expected.items():
            if key in received:
                yield from _differences(child, received[key], (*path, key))
            else:
                yield (*path, key), "missing in what was received"
        yield from (((*path, key), "received, but unknown here") for key in received if key not in expected)
    elif here == "sequence":
        if all(_kind(child) == "value" for child in (*expected, *received)):
            return
        if len(expected) != len(received):
            yield path, f"{len(expected)} elements here, {len(received)} received"
        for index, (child, other) in enumerate(zip(expected, received, strict=False)):
            yield from _differences(child, other, (*path, index))
    elif here == "tensor":
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
