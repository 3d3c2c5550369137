"""Buffers that the forward pass changes (BatchNorm's statistics), kept equal in all replica groups.

The forward passes of each group see other samples, so their statistics differ. At the end of a step, before its vote,
all groups take the buffers of the first participant that contributes. They are sent as bytes, in a single reduction for
all dtypes, so they are bitwise equal. A discarded step restores the buffers from its beginning.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten  # pyright: ignore[reportPrivateUsage]
from torch._utils import _unflatten_dense_tensors as unflatten  # pyright: ignore[reportPrivateUsage]

from agent_client.step.agent import Agent
from lighthouse_protocol.messages.membership import Tag

MARK = 1
"""One byte that only the first participant sets. The sum shows whether exactly one did."""
HEAD_BYTES = 16
"""The mark, padded with zeros to the alignment of any dtype."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Buffers of one dtype on one device, which are copied in one call."""

    buffers: list[Tensor]

    def flat(self) -> Tensor:
        flat = flatten(self.buffers)
        return flat.clone() if len(self.buffers) == 1 else flat  # torch returns a single buffer itself

    def assign(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.buffers, unflatten(flat, self.buffers))  # pyright: ignore[reportPrivateUsage]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype


class SharedBuffers:
    """Shares the buffers that `find` returns. It is called each time, since a script may replace buffers."""

    def __init__(self, agent: Agent, find: Callable[[], Sequence[Tensor]]) -> None:
        self._internals, self._machine = agent.internals, agent.internals.machine
        self._find = find
        self._before: tuple[Tag, int, list[Tensor]] | None = None
        self._coming: list[tuple[list[_Alike], Future[Tensor]]] = []

    def begin_step(self) -> None:
        """Copy the buffers before the first forward pass of a step."""
        machine = self._machine
        began = machine.tag, machine.ended
        if self._before is None or self._before[:2] != began:
            with torch.no_grad():
                self._before = (*began, [alike.flat() for alike in self._alike()])

    @torch.no_grad()
    def agree(self) -> None:
        """Begin to receive the buffers of the first participant. Without peers, do nothing."""
        self._coming = []
        if self._machine.has_peers:
            for device, on_device in groupby(self._alike(), lambda alike: alike.buffers[0].device):
                found = list(on_device)
                head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device=device)
                head[0] = MARK
                packed = torch.cat([head, *(alike.flat().view(torch.uint8) for alike in found)])
                self._coming.append((found, self._internals.take_from_first(packed)))

    @torch.no_grad()
    def settle(self, *, is_committed: bool) -> None:
        if is_committed:
            for found, packed in self._coming:
                contents = packed.result()[HEAD_BYTES:].split([alike.nbytes for alike in found])
                for alike, content in zip(found, contents, strict=True):
                    alike.assign(content.view(alike.dtype))
        else:
            self.restore()
        self._before, self._coming = None, []

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the changes by the forward passes of this step."""
        # With another tag, a peer's state was installed since.
        if self._before is not None and self._before[0] == self._machine.tag:
            for alike, before in zip(self._alike(), self._before[2], strict=True):
                alike.assign(before)

    def _alike(self) -> list[_Alike]:
        """Sort the buffers by device, the widest dtype first, so that each one is aligned."""
        found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in self._find():
            if buffer.numel():
                found.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        keys = sorted(found, key=lambda key: (str(key[0]), -key[1].itemsize, str(key[1])))
        return [_Alike(found[key]) for key in keys]
