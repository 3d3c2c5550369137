"""Gradients that outlive the loss of a peer.

Each bucket's content before its reduction is kept until the next backward pass. If a peer is lost, the step is retried
under the next quorum with that content, bucket by bucket in the order of a backward pass. So it matches peers that do
the same, and peers that compute the step again. Nothing is recomputed, but a second set of gradients needs memory.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import GradBucket

from agent_client.state.snapshot import has_no_gaps
from agent_client.step.agent import Agent
from agent_client.step.comparison import Part

log = logging.getLogger(__name__)

MIB = 2**20


@dataclass(slots=True)
class _Kept:
    parameters: list[Tensor]
    """Parameters of the bucket, in its order."""
    content: Tensor
    """Gradients before the reduction, flat."""
    name: str
    """Name of the sum."""
    rest: Sequence[Part]
    """Sums that follow."""


@dataclass(slots=True)
class Salvage:
    agent: Agent
    parameters: list[torch.nn.Parameter] = field(default_factory=list[torch.nn.Parameter])
    """Parameters in the order of the map of used parameters."""
    _buckets: list[_Kept] = field(default_factory=list[_Kept])
    _used: tuple[Tensor, str] | None = None
    _is_logged: bool = False

    @property
    def held_bytes(self) -> int:
        return sum(kept.content.nbytes for kept in self._buckets)

    def keep_bucket(self, bucket: GradBucket, name: str, rest: Sequence[Part]) -> None:
        if bucket.index() == 0:
            self._buckets, self._used = [], None
        self._buckets.append(_Kept(bucket.parameters(), bucket.buffer().clone(), name, rest))
        if bucket.is_last() and not self._is_logged:
            self._is_logged = True
            log.info("salvage: %.1f MiB of gradients are kept for each step", self.held_bytes / MIB)

    def keep_used(self, used: Tensor, name: str) -> None:
        """Keep the map of the parameters that this rank has used, if torch requests it. It is reduced last."""
        self._used = used.clone(), name

    def reduce_again(self) -> None:
        """Reduce the kept buckets under the present quorum, and store the means as a backward pass would."""
        missing: dict[int, Tensor] = {}
        for kept in self._buckets:
            reduced = self.agent.all_reduce(kept.content.clone(), name=kept.name, followed_by=kept.rest).result()
            sizes = [parameter.numel() for parameter in kept.parameters]
            for parameter, mean in zip(kept.parameters, reduced.split(sizes), strict=True):
                # As torch does: in the memory order of the parameter, if that has no gaps.
                if has_no_gaps(parameter.shape, parameter.stride()):
                    mean = mean.as_strided(parameter.shape, parameter.stride())
                else:
                    mean = mean.view(parameter.shape)
                if parameter.grad is None:
                    missing[id(parameter)] = mean
                else:
                    parameter.grad.copy_(mean)
        if self._used is None:
            return
        # Remove gradients of parameters that no group used, and set those of parameters that only peers used.
        used, name = self._used
        by_any = self.agent.all_reduce(used.clone(), name=name).result() > 0
        for parameter, here, anywhere in zip(self.parameters, used.tolist(), by_any.tolist(), strict=True):
            if anywhere and id(parameter) in missing:
                parameter.grad = missing[id(parameter)].clone()
            elif here and not anywhere:
                parameter.grad = None
