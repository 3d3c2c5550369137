"""Buffers of all shapes and dtypes go through one reduction, bit by bit, and back where a step is discarded."""

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from agent_client.training.ddp import SharedBuffers
from lighthouse_protocol.messages.membership import Tag
from tests.agent_client.lone_agent import LoneAgent


class Peer(LoneAgent):
    """An Agent whose first participant has `content`."""

    tag, ended, has_peers = Tag(3, 7), 3, True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensor] = []
        self.content: list[Tensor] | None = None

    def receive_from_first(self, packed: Tensor) -> "Future[Tensor]":
        self.told.append(packed.clone())
        done: Future[Tensor] = Future()
        done.set_result(packed if self.content is None else self.content.pop(0))
        return done


def buffers_of(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(7, 4, generator=generator)
    return [
        numbers[:, 0].clone(),
        torch.tensor(seed),
        numbers.bool(),
        numbers.half(),
        numbers.double().T,
        torch.zeros(0, 3),
        numbers[:, 1],
        numbers.to(torch.bfloat16)[0, 0],
        torch.tensor([1, seed], dtype=torch.uint8),
    ]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def share(agent: Any, buffers: list[Tensor], *, is_committed: bool = True) -> None:
    shared = SharedBuffers(agent, lambda: buffers)
    shared.begin_step()
    for buffer in buffers:
        buffer.add_(1) if buffer.dtype != torch.bool else buffer.logical_not_()
    shared.start()
    shared.end_step(is_committed=is_committed)


def test_at_a_commit_they_are_those_of_the_first() -> None:
    first, other = Peer(), Peer()
    expected, buffers = buffers_of(1), buffers_of(2)
    share(first, expected)
    assert int(first.told[0][0]) == 1
    other.content = list(first.told)
    share(other, buffers)
    check_same(buffers, expected)
    assert not torch.equal(expected[0], buffers_of(1)[0])


def test_a_discarded_step_leaves_them_as_they_were() -> None:
    for buffers, expected in ((buffers_of(1), buffers_of(1)), ([torch.ones(3)], [torch.ones(3)])):
        share(Peer(), buffers, is_committed=False)
        check_same(buffers, expected)


def test_a_model_without_buffers_sends_nothing() -> None:
    agent = Peer()
    share(agent, [])
    assert agent.told == []
