"""The same rank of the other replica groups: one process group, made anew for every quorum."""

from torch import Tensor
from torch.distributed import PrefixStore

from agent_client.process_group.gloo import GlooGroup, connect_store
from protos.membership import Assignment

STORE_PREFIX = "lighthouse"


class Peers:
    """`host` is the address of this host that the peers can reach."""

    def __init__(self, group_rank: int, host: str, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._group_rank = group_rank
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._group: GlooGroup | None = None
        self._quorum_id: int | None = None

    def configure(self, assignment: Assignment) -> None:
        """Meet the participants; an unchanged quorum_id costs nothing. Raises RuntimeError if one does not come."""
        if assignment.quorum_id == self._quorum_id:
            return
        self.drop()
        if assignment.replica_world_size > 1:
            store = connect_store(assignment.store_address, self._connect_timeout_s)
            self._group = GlooGroup(
                PrefixStore(f"{STORE_PREFIX}/{assignment.quorum_id}/{self._group_rank}", store),
                assignment.replica_rank,
                assignment.replica_world_size,
                self._host,
                connect_timeout_s=self._connect_timeout_s,
                timeout_s=self._timeout_s,
            )
        self._quorum_id = assignment.quorum_id

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """The sum over the participants, in place. Raises RuntimeError when a peer is lost."""
        if self._quorum_id is None:
            raise RuntimeError("the process group of this quorum was given up")
        if self._group is not None:
            self._group.all_reduce(tensor, timeout_s)

    def drop(self) -> None:
        """End what is under way, for the peers too; the next quorum meets anew."""
        if self._group is not None:
            self._group.abort()
        self._group = self._quorum_id = None
