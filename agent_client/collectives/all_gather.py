"""Byte exchange between all ranks of a quorum.

Either every rank of a replica group receives the bytes of all ranks, or none does. The exchange runs between two steps
over the connections of the last quorum, so it does not include groups that have joined since. It only needs sums, in
which each rank fills its own place of a tensor, because every kind of process group can compute sums.

A rank that has finished may exit and close its connections while another still waits for data that was sent long
before. So a last sum confirms that all ranks have received everything. It may fail, which only means that another rank
has ended since.
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
"""Sums a tensor over all ranks, in place. Raises RuntimeError."""

MAX_BYTES = 2**30


def gather(total: Sum, place: int, size: int, own: bytes) -> list[bytes]:
    """Return the bytes of every place. `total` sums a tensor over all ranks.

    Raises:
        RuntimeError: `total` failed, or the bytes exceed MAX_BYTES, as when other ranks sum something else.
    """
    if size == 1:
        return [own]
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[place] = len(own)
    total(lengths)
    ends: list[int] = lengths.cumsum(0).tolist()
    if not 0 <= ends[-1] <= MAX_BYTES or bool((lengths < 0).any()):
        raise RuntimeError(f"the ranks send {ends[-1]} bytes, more than {MAX_BYTES}; or some of them are missing")
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = ends[place] - len(own)
    if own:
        everything[begin : ends[place]] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    if ends[-1]:
        total(everything)
    with contextlib.suppress(RuntimeError):
        total(torch.zeros(1))
    view = everything.numpy().tobytes()
    return [view[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


class AllGather:
    """Exchanges bytes among the ranks with the same assignment. Use it from the Agent's thread only."""

    def __init__(
        self, assignment: Assignment, peers: Peers, group: GlooGroup | None, group_rank: int, *, within_s: float
    ) -> None:
        self.assignment = assignment
        self._peers = peers
        self._group = group
        self._group_rank = group_rank
        self.within_s = within_s

    def exchange(self, own: bytes, disagreement: Callable[[], str] = str) -> list[list[bytes]]:
        """Return the bytes of all ranks, by replica_rank, then by group rank.

        `disagreement` is called first. It returns the reason why other participants do not take part, or an empty text.

        Raises:
            EvaluationInterrupted: In all ranks of a group or in none.
        """
        own_of_all, error = self._over_groups(own, disagreement)
        received = self._within_group({"error": error, "of": own_of_all})
        if errors := [each["error"] for each in received if each["error"]]:
            raise EvaluationInterrupted(errors[0])
        return [list(of_ranks) for of_ranks in zip(*(each["of"] for each in received), strict=True)]

    def _over_groups(self, own: bytes, disagreement: Callable[[], str]) -> tuple[list[bytes], str]:
        if reason := disagreement():
            return [], reason
        place, size = self.assignment.replica_rank, self.assignment.replica_world_size
        try:
            return gather(lambda tensor: self._peers.all_reduce(tensor, self.within_s), place, size, own), ""
        except RuntimeError as e:
            self._peers.drop()
            return [], f"the connections to the other replica groups ended: {first_line(e)}"

    def _within_group(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        group = self._group
        if group is None:
            return [own]
        try:
            received = gather(
                lambda tensor: group.all_reduce(tensor, self.within_s),
                self._group_rank,
                group.size,
                b"".join(encode(own)),
            )
            return [decode(io.BytesIO(each), len(each)) for each in received]
        except (RuntimeError, CorruptState) as e:
            self._peers.drop()
            raise EvaluationInterrupted(f"the connections inside the replica group ended: {first_line(e)}") from e
