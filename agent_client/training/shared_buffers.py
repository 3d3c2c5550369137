"""Buffers that the forward pass moves (BatchNorm's statistics), kept equal in all replica groups.

Each group's forward passes see other samples, so its statistics differ. At the end of a step, before its vote, all take
those of the first participant that contributes: as bytes, so in one reduction whatever their dtypes are, and bit by
bit. A discarded step leaves them as they were when it began.
"""

from collections.abc import Callable, Iterator, Sequence
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
"""One byte that only the first participant sets: the sum tells whether there was exactly one."""
HEAD_BYTES = 16
"""The mark, and zeros up to where any dtype may begin."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """The buffers of one dtype on one device. Some hundred small ones are moved in one call."""

    buffers: list[Tensor]

    def flat(self) -> Tensor:
        """A copy."""
        flat = flatten(self.buffers)
        return flat.clone() if len(self.buffers) == 1 else flat  # a single one comes back as it is

    def assign(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.buffers, unflatten(flat, self.buffers))  # pyright: ignore[reportPrivateUsage]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype


class SharedBuffers:
    """`find` names the buffers as they are now: a script may put others in their place."""

    def __init__(self, agent: Agent, find: Callable[[], Sequence[Tensor]]) -> None:
        self._agent = agent
        self._find = find
        self._before: tuple[Tag, int, list[Tensor]] | None = None
        self._coming: list[tuple[list[_Alike], Future[Tensor]]] = []

    def begin_step(self) -> None:
        """Before the first forward pass of a step moves them."""
        began = self._agent.tag, self._agent.steps_ended
        if self._before is None or self._before[:2] != began:
            with torch.no_grad():
                self._before = (*began, [alike.flat() for alike in self._alike()])

    def agree(self) -> None:
        """Begin to take those of the first participant. Alone, there is nothing to take."""
        self._coming = []
        if self._agent.has_peers:
            for _, on_device in groupby(self._alike(), lambda alike: alike.buffers[0].device):
                found = list(on_device)
                self._coming.append((found, self._agent.take_from_first(_packed(found))))

    @torch.no_grad()
    def settle(self, *, is_committed: bool) -> None:
        if is_committed:
            for found, packed in self._coming:
                _unpack(packed.result(), found)
        else:
            self.restore()
        self._before, self._coming = None, []

    @torch.no_grad()
    def restore(self) -> None:
        """Take back what the forward passes of this step have made of them."""
        if self._before is not None and self._before[0] == self._agent.tag:  # else a peer's state came in between
            for alike, before in zip(self._alike(), self._before[2], strict=True):
                alike.assign(before)

    def _alike(self) -> list[_Alike]:
        """Device by device; the widest dtype first, so that each begins where its numbers may."""
        found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in self._find():
            if buffer.numel():
                found.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        keys = sorted(found, key=lambda key: (str(key[0]), -key[1].itemsize, str(key[1])))
        return [_Alike(found[key]) for key in keys]


@torch.no_grad()
def _packed(found: Sequence[_Alike]) -> Tensor:
    """Their bytes, after the head."""
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device=found[0].buffers[0].device)
    head[0] = MARK
    return torch.cat([head, *(alike.flat().view(torch.uint8) for alike in found)])


def _unpack(packed: Tensor, found: Sequence[_Alike]) -> None:
    contents: Iterator[Tensor] = iter(packed[HEAD_BYTES:].split([alike.nbytes for alike in found]))
    for alike, content in zip(found, contents, strict=True):
        alike.assign(content.view(alike.dtype))
