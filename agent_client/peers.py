"""The same rank of the other replica groups: one process group, made anew for every quorum."""

import threading

from torch import Tensor
from torch.distributed import PrefixStore

from agent_client.process_group.gloo import GlooGroup, connect_store
from protos.membership import Assignment

STORE_PREFIX = "lighthouse"


class Peers:
    """`host` is the address of this host that the peers can reach.

    configure and all_reduce belong to one thread, revoke and drop are for any.
    """

    def __init__(self, group_rank: int, host: str, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._group_rank = group_rank
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._group: GlooGroup | None = None
        self._quorum_id: int | None = None
        self._ended: str | None = None

    def configure(self, assignment: Assignment) -> None:
        """Meet the participants; an unchanged quorum_id costs nothing. Raises RuntimeError if one does not come."""
        if assignment.quorum_id == self._quorum_id:
            return
        self.drop()
        with self._lock:
            self._quorum_id, self._ended = assignment.quorum_id, None
        group = self._connect(assignment) if assignment.replica_world_size > 1 else None
        with self._lock:
            self._group = group
            if self._ended is None or group is None:
                return
        group.abort()

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """The sum over the participants, in place. Raises RuntimeError when a peer is lost."""
        if self._quorum_id is None or self._ended is not None:
            raise RuntimeError(self._ended or "the process group of this quorum was given up")
        if self._group is not None:
            self._group.all_reduce(tensor, timeout_s)

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End what is under way in that quorum, or in any; what has completed has completed."""
        with self._lock:
            if self._quorum_id is None or quorum_id not in (None, self._quorum_id):
                return
            self._ended = f"quorum {self._quorum_id} was revoked: {reason}"
            group = self._group
        if group is not None:
            group.abort()

    def drop(self) -> None:
        """End what is under way, for the peers too; the next quorum meets anew."""
        with self._lock:
            group, self._group, self._quorum_id = self._group, None, None
        if group is not None:
            group.abort()

    def _connect(self, assignment: Assignment) -> GlooGroup:
        store = connect_store(assignment.store_address, self._connect_timeout_s)
        return GlooGroup(
            PrefixStore(f"{STORE_PREFIX}/{assignment.quorum_id}/{self._group_rank}", store),
            assignment.replica_rank,
            assignment.replica_world_size,
            self._host,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
        )
