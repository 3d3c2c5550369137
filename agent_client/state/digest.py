"""Computes digests of tensors, which ranks compare to check that their states are bitwise equal.

A digest is the 128-bit XXH3 of one part of the tensors, a *window*. Each check covers the next window, so n checks
cover all n windows. A small tensor costs more than its size suggests, so the number of tensors in a window is also
limited. On a GPU, `take` does not wait for the copy of the window, but `read` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128

WINDOW_BYTES = 2 * 2**20
LEAST_COST = WINDOW_BYTES // 48  # minimum number of bytes for which a tensor counts


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` (exclusive) of tensor number `index`."""

    index: int
    start: int
    stop: int


@dataclass(slots=True)
class PendingDigest:
    """Bytes of a window (a part of the tensors), copied to one CPU tensor per device. `read` computes their digest.

    The copies are complete once all `events` have completed.
    """

    copies: list[Tensor]
    events: list[torch.cuda.Event]

    def read(self) -> tuple[int, int]:
        for event in self.events:
            event.synchronize()
        hashed = xxh3_128()
        for copy in self.copies:
            hashed.update(copy.numpy().data)
        digest = hashed.digest()
        return int.from_bytes(digest[:8], signed=True), int.from_bytes(digest[8:], signed=True)


class Digests:
    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._names: list[int] = []
        self._windows: list[list[Piece]] = [[]]

    @property
    def count(self) -> int:
        return len(self._windows)

    @torch.no_grad()
    def take(
        self, tensors: Sequence[Tensor], number: int, of: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
    ) -> PendingDigest:
        """Start computing the digest of one window of the tensors.

        Args:
            tensors: The tensors. Only the local shard of a sharded tensor is used.
            number: Number of the window, modulo the number of windows.
            of: Maps a tensor to the one to digest instead, such as its gradient, which must have the same shape, or to
                None to leave it out.
        """
        names = list(map(id, tensors))
        if names != self._names:
            local = [_local(tensor) for tensor in tensors]
            sizes = [(0, 1) if it is None else (it.numel(), it.element_size()) for it in local]
            self._names, self._windows = names, windows(sizes, self._window_bytes)
        by_device: dict[torch.device, list[Tensor]] = {}
        for piece in self._windows[number % len(self._windows)]:
            tensor = _local(of(tensors[piece.index]))
            if tensor is not None:
                flat = tensor.reshape(-1)[piece.start : piece.stop].contiguous().view(torch.uint8)
                by_device.setdefault(tensor.device, []).append(flat)
        copies: list[Tensor] = []
        events: list[torch.cuda.Event] = []
        for device, parts in by_device.items():
            copy = torch.cat(parts)
            if device.type == "cuda":
                copy = torch.empty(copy.shape, dtype=copy.dtype, pin_memory=True).copy_(copy, non_blocking=True)
                with torch.cuda.device(device):
                    events.append(torch.cuda.Event())
                    events[-1].record()
            copies.append(copy)
        return PendingDigest(copies, events)


def windows(sizes: Sequence[tuple[int, int]], window_bytes: int = WINDOW_BYTES) -> list[list[Piece]]:
    """Divide tensors into windows (lists of pieces), so that each element is in exactly one window.

    Args:
        sizes: (number of elements, bytes per element) of each tensor.
        window_bytes: Maximum size of a window in bytes.
    """
    found: list[list[Piece]] = [[]]
    room = window_bytes
    for index, (count, item_bytes) in enumerate(sizes):
        start = 0
        while start < count:
            if room < min(LEAST_COST, window_bytes):
                found.append([])
                room = window_bytes
            stop = min(count, start + max(1, room // item_bytes))
            found[-1].append(Piece(index, start, stop))
            room -= max((stop - start) * item_bytes, LEAST_COST)
            start = stop
    return found


def _local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.detach()
