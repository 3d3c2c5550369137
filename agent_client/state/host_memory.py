"""Memory of the host for large tensors: in huge pages, where the system gives them to whoever asks.

A state of gigabytes is otherwise a page fault for each 4 KiB of it, and these take longer than the copy.
"""

import contextlib
import mmap

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
    if tensor.nbytes < HUGE_PAGE_BYTES or not is_dense(tensor):
        return tensor.to("cpu", copy=True)
    return empty_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Its bytes lie in row-major order, without gaps, and are its values as they stand."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
