"""Memory of the host for large tensors: in huge pages, where the system gives them to whoever asks.

A state of gigabytes is otherwise a page fault for each 4 KiB of it, and these take longer than the copy.
"""

import contextlib
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE_BYTES = 2 * 2**20


def empty_bytes(size: int) -> torch.Tensor:
    """`size` bytes on the CPU, shape (size,), uint8; the system commits them only as they are filled.

    RuntimeError, as of torch, where this host cannot allocate so many.
    """
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot allocate {size} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, with memory of its own. `tensor` needs no gradient."""
    if tensor.nbytes < HUGE_PAGE_BYTES or tensor.is_conj() or tensor.is_neg():
        return tensor.to("cpu", copy=True)
    return with_layout(empty_bytes(tensor.nbytes), tensor.dtype, tensor.shape, kept_strides(tensor)).copy_(tensor)


def kept_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a copy of `tensor` has: its own (channels_last, transposed), without gaps or overlaps.

    Fused optimizers work in memory order, so a parameter and its optimizer state must keep the same one.
    """
    strides = tensor.stride()
    if tensor.is_contiguous() or has_no_gaps(tensor.shape, strides):
        return strides
    return torch.empty_like(tensor, device="meta").stride()  # torch's own rule for a copy


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Check that the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose row-major order is the order in memory of a copy of `tensor`."""
    strides = kept_strides(tensor)
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def with_layout(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """View bytes on the CPU as a tensor with that layout."""
    return raw.view(dtype).as_strided(shape, strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Its bytes lie in row-major order, without gaps, and are its values as they stand."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
