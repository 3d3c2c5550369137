"""All ranks of a quorum bring bytes, and each of them gets what all have brought; or none in a replica group does.

Between two steps, over the connections of the last quorum: who has joined since is not in it. Sums of tensors in which
each rank fills a place of its own are all that is needed, and all that every process group can do.

A rank that is done may end at once, and close its connections while another still waits for data that was sent long
ago. So a last sum tells each rank that all have got this far, and have what they came for. It may fail: that only says
that another rank has ended since.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch

from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import EvaluationInterrupted, first_line
from agent_client.state.codec import decode, encode
from agent_client.state.tree import CorruptState
from lighthouse_protocol.messages.membership import Assignment

Sum = Callable[[torch.Tensor], object]
"""Over all ranks, in place. Raises RuntimeError."""

MAX_BYTES = 2**30


def gather(total: Sum, place: int, size: int, mine: bytes) -> list[bytes]:
    """What each of `size` places has brought, by the sums of their tensors. Raises RuntimeError: what `total` raises,
    or for more than MAX_BYTES, as where other ranks sum something else."""
    if size == 1:
        return [mine]
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[place] = len(mine)
    total(lengths)
    ends: list[int] = lengths.cumsum(0).tolist()
    if not 0 <= ends[-1] <= MAX_BYTES or bool((lengths < 0).any()):
        raise RuntimeError(f"the ranks bring {ends[-1]} bytes, more than {MAX_BYTES}; or some of them are missing")
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = ends[place] - len(mine)
    if mine:
        everything[begin : ends[place]] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    if ends[-1]:
        total(everything)
    with contextlib.suppress(RuntimeError):
        total(torch.zeros(1))
    view = everything.numpy().tobytes()
    return [view[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


class AllGather:
    """The ranks that were assigned `assignment`. For the Agent's own thread."""

    def __init__(
        self, assignment: Assignment, peers: Peers, group: GlooGroup | None, group_rank: int, *, within_s: float
    ) -> None:
        self.assignment = assignment
        self._peers = peers
        self._group = group
        self._group_rank = group_rank
        self.within_s = within_s

    def bring(self, mine: bytes, disagreement: Callable[[], str] = str) -> list[list[bytes]]:
        """By replica_rank, then by group rank. Raises EvaluationInterrupted, in all ranks of a group or in none.

        `disagreement` is asked first: why the other participants do not gather, or an empty text.
        """
        mine_of_all, error = self._over_groups(mine, disagreement)
        told = self._within_group({"error": error, "of": mine_of_all})
        if errors := [each["error"] for each in told if each["error"]]:
            raise EvaluationInterrupted(errors[0])
        return [list(of_ranks) for of_ranks in zip(*(each["of"] for each in told), strict=True)]

    def _over_groups(self, mine: bytes, disagreement: Callable[[], str]) -> tuple[list[bytes], str]:
        if reason := disagreement():
            return [], reason
        place, size = self.assignment.replica_rank, self.assignment.replica_world_size
        try:
            return gather(lambda tensor: self._peers.all_reduce(tensor, self.within_s), place, size, mine), ""
        except RuntimeError as e:
            self._peers.drop()
            return [], f"the connections to the other replica groups ended: {first_line(e)}"

    def _within_group(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        group = self._group
        if group is None:
            return [mine]
        try:
            told = gather(
                lambda tensor: group.all_reduce(tensor, self.within_s),
                self._group_rank,
                group.size,
                b"".join(encode(mine)),
            )
            return [decode(io.BytesIO(each), len(each)) for each in told]
        except (RuntimeError, CorruptState) as e:
            self._peers.drop()
            raise EvaluationInterrupted(f"the connections inside the replica group ended: {first_line(e)}") from e
