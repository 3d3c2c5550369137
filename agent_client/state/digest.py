"""Computes digests of tensors, by which ranks check that their states are bitwise equal.

The digest consists of two sums of 64-bit products. In the first sum, each word, and in the second its upper half, is
multiplied by a pseudorandom weight that depends on its position. The digest changes if an element changes, if two
elements are swapped, or if signs flip. The sums wrap around and are exact, so the order of summation does not matter,
and they are equal on all machines with the same byte order. With a GPU, only `read` waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agent_client.state.rules import WINDOW_BYTES, Digest, Piece, windows

WORD_BYTES = 8
HALF_BITS = 32
MULTIPLIER = 0x9E3779B97F4A7C15  # constant of splitmix64, which generates the weights
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(slots=True)
class PendingDigest:
    """A digest that is being computed: one sum per device. The sums are on the CPU once `events` have occurred."""

    sums: list[Tensor]
    events: list[torch.cuda.Event]

    def read(self) -> Digest:
        for event in self.events:
            event.synchronize()
        plain = weighted = 0
        for sums in self.sums:
            first, second = sums.tolist()
            plain, weighted = plain * MULTIPLIER + first, weighted * MULTIPLIER + second
        return _wrapped(plain), _wrapped(weighted)


class Digests:
    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._names: list[int] = []
        self._windows: list[list[Piece]] = [[]]
        self._memory: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        """Buffers by device: for words, for their upper halves, and the weights."""

    @property
    def count(self) -> int:
        return len(self._windows)

    @torch.no_grad()
    def take(
        self, tensors: Sequence[Tensor], number: int, of: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
    ) -> PendingDigest:
        """Start to compute the digest of one window of the tensors.

        Args:
            tensors: The tensors. Of a sharded tensor, only the local shard is used.
            number: Number of the window, modulo the number of windows.
            of: Returns the tensor to use instead of each given one, with the same shape, or None to leave it out.
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
                flat = tensor.reshape(-1)[piece.start : piece.stop].view(torch.uint8)
                by_device.setdefault(tensor.device, []).append(flat)
        sums: list[Tensor] = []
        events: list[torch.cuda.Event] = []
        for device, parts in by_device.items():
            both = self._sums(parts)
            if device.type != "cuda":
                sums.append(both.cpu())
                continue
            pinned = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            sums.append(pinned.copy_(both, non_blocking=True))
            with torch.cuda.device(device):
                events.append(torch.cuda.Event())
                events[-1].record()
        return PendingDigest(sums, events)

    def _sums(self, parts: Sequence[Tensor]) -> Tensor:
        size = sum(part.numel() for part in parts)
        count = -(-size // WORD_BYTES)
        device = parts[0].device
        if device not in self._memory or len(self._memory[device][0]) < count:
            empty = torch.empty(count, dtype=torch.int64, device=device)
            self._memory[device] = empty, torch.empty_like(empty), _weights(count).to(device)
        words, halves, weights = (buffer[:count] for buffer in self._memory[device])
        words[-1:] = 0
        torch.cat(list(parts), out=words.view(torch.uint8)[:size])
        torch.bitwise_right_shift(words, HALF_BITS, out=halves)
        if words.is_cuda:  # torch.dot does not support integers on CUDA
            return torch.stack([words.mul_(weights).sum(), halves.mul_(weights).sum()])
        return torch.stack([torch.dot(words, weights), torch.dot(halves, weights)])


def _weights(count: int) -> Tensor:
    """Return the weights of the positions 0 to `count` - 1: splitmix64, computed with unsigned shifts."""
    weights = torch.arange(1, count + 1) * _wrapped(MULTIPLIER)
    for bits, multiplier in _MIXES:
        shifted = (weights >> bits) & ((1 << (64 - bits)) - 1)
        weights = (weights ^ shifted) * _wrapped(multiplier)
    return weights


def _local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.detach()


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
