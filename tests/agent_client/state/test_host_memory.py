"""Large tensors lie in huge pages where the system gives them; nobody sees any other difference."""

import math
import mmap
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_client.state import snapshot
from agent_client.state.snapshot import HUGE_PAGE_BYTES, copy_of, empty_bytes
from tests.agent_client.state.trees import resident_bytes

SIZES = [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES + 5]
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


def mapping_of(address: int) -> str:
    """What the kernel says of the mapping that holds it; empty: there is none."""
    for found in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        limits = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", found)
        if limits and int(limits[1], 16) <= address < int(limits[2], 16):
            return found
    return ""


@pytest.mark.parametrize("size", SIZES)
def test_bytes_can_be_written_and_are_no_more_than_asked_for(size: int) -> None:
    memory = empty_bytes(size)
    memory.fill_(7)
    assert (memory.shape, memory.dtype, memory.untyped_storage().nbytes()) == ((size,), torch.uint8, size)
    assert memory.numpy().data.nbytes == size
    assert int(memory.sum()) == 7 * size


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_is_asked_for_huge_pages_where_one_fits(size: int) -> None:
    memory = empty_bytes(size)
    flags = re.search(r"VmFlags:.*", mapping_of(memory.data_ptr())) if size else None
    assert (flags is not None and " hg" in flags[0]) == (size >= HUGE_PAGE_BYTES)


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_what_nobody_holds_goes_back_to_the_system() -> None:
    memory = empty_bytes(HUGE_PAGE_BYTES)
    part, address = memory[10:20], memory.data_ptr()
    del memory
    assert mapping_of(address), "a part of it holds it"
    del part
    assert " hg" not in mapping_of(address)


def test_nothing_is_committed_before_it_is_filled() -> None:
    before = resident_bytes()
    memory = empty_bytes(64 * HUGE_PAGE_BYTES)
    memory[5] = 1
    assert resident_bytes() - before < 16 * HUGE_PAGE_BYTES
    memory.fill_(1)
    assert resident_bytes() - before > 48 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("size", [2**60, 2**70])
def test_more_than_there_is_cannot_be_allocated(size: int) -> None:
    with pytest.raises(RuntimeError, match="cannot allocate"):
        empty_bytes(size)


def test_a_kernel_without_them_gives_usual_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unable(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError

    monkeypatch.setattr(mmap, "mmap", Unable)
    assert len(empty_bytes(HUGE_PAGE_BYTES).fill_(1)) == HUGE_PAGE_BYTES
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert len(empty_bytes(HUGE_PAGE_BYTES).fill_(1)) == HUGE_PAGE_BYTES


def strided(shape: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    tensor = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    if kind == "transposed":
        return tensor.transpose(0, -1)
    if kind == "every other":
        return tensor[::2]
    return tensor.conj() if kind == "conjugate" else tensor


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    kind=st.sampled_from(["dense", "transposed", "every other", "conjugate"]),
)
def test_a_copy_is_as_torch_makes_it(shape: list[int], dtype: torch.dtype, kind: str) -> None:
    tensor = strided(shape, dtype, kind)
    with mock.patch.object(snapshot, "HUGE_PAGE_BYTES", 1):  # each is large
        copy = copy_of(tensor)
    usual = tensor.to("cpu", copy=True)
    assert torch.equal(copy.resolve_conj(), usual.resolve_conj())
    assert (copy.shape, copy.dtype, copy.is_contiguous()) == (usual.shape, usual.dtype, usual.is_contiguous())
    assert not copy.numel() or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("shape", [(1024, 1024), (2, 3 * HUGE_PAGE_BYTES // 8), ()])
def test_a_large_copy_shares_nothing(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, dtype=torch.float64)
    copy = copy_of(tensor)
    assert torch.equal(copy, tensor)
    tensor.fill_(-1)
    assert bool((copy >= 0).all())
