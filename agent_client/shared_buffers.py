"""Buffers that the forward pass moves (BatchNorm's statistics), kept equal in all replica groups.

Each group's forward passes see other samples, so its statistics differ. At the end of a step, before its vote, all take
those of the first participant that contributes: as bytes, so in one reduction whatever their dtypes are, and bit by
bit. A discarded step leaves them as they were when it began.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from agent_client.agent import Agent
from protos.membership import Tag

MARK = 1
"""One byte that only the first participant sets: the sum tells whether there was exactly one."""


class SharedBuffers:
    """`find` names the buffers as they are now: a script may put others in their place."""

    def __init__(self, agent: Agent, find: Callable[[], Sequence[Tensor]]) -> None:
        self._agent = agent
        self._find = find
        self._before: tuple[Tag, int, list[Tensor]] | None = None
        self._coming: list[Future[Tensor]] = []

    def begin_step(self) -> None:
        """Before the first forward pass of a step moves them."""
        began = self._agent.tag, self._agent.steps_ended
        if self._before is None or self._before[:2] != began:
            self._before = (*began, [buffer.detach().clone() for buffer in self._find()])

    def agree(self) -> None:
        """Begin to take those of the first participant. Alone, there is nothing to take."""
        self._coming = []
        if self._agent.has_peers:
            self._coming = [self._agent.take_from_first(_packed(buffers)) for buffers in self._by_device()]

    def settle(self, *, is_committed: bool) -> None:
        if is_committed:
            for buffers, packed in zip(self._by_device() if self._coming else [], self._coming, strict=True):
                _unpack(packed.result(), buffers)
        elif self._before is not None and self._before[0] == self._agent.tag:  # else a peer's state came in between
            for buffer, before in zip(self._find(), self._before[2], strict=True):
                _assign(buffer, before)
        self._before, self._coming = None, []

    def _by_device(self) -> list[list[Tensor]]:
        devices: dict[torch.device, list[Tensor]] = {}
        for buffer in self._find():
            devices.setdefault(buffer.device, []).append(buffer.detach())
        return list(devices.values())


def _packed(buffers: Sequence[Tensor]) -> Tensor:
    """Their bytes, after the mark."""
    mark = torch.full((1,), MARK, dtype=torch.uint8, device=buffers[0].device)
    return torch.cat([mark, *(buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers)])


def _unpack(packed: Tensor, buffers: Sequence[Tensor]) -> None:
    sizes = [buffer.nbytes for buffer in buffers]
    for buffer, content in zip(buffers, packed[1:].split(sizes), strict=True):
        _assign(buffer, content.clone().view(buffer.dtype).view(buffer.shape))


def _assign(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)
