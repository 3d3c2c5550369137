"""The same rank of the other replica groups: one process group, made anew for every quorum."""

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

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
        self._quorum_id: int | None = None
        self._met: Future[GlooGroup | None] = Future()

    def configure(self, assignment: Assignment) -> None:
        """Meet the participants; an unchanged quorum_id costs nothing. Raises RuntimeError if one does not come."""
        if assignment.quorum_id == self._quorum_id:
            return
        self.drop()
        met: Future[GlooGroup | None] = Future()
        with self._lock:
            self._quorum_id, self._met = assignment.quorum_id, met
        threading.Thread(target=self._meet, args=(assignment, met), name="lighthouse peers", daemon=True).start()
        met.result()

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """The sum over the participants, in place. Raises RuntimeError when a peer is lost."""
        if self._quorum_id is None:
            raise RuntimeError("the process group of this quorum was given up")
        if (group := self._met.result()) is not None:
            group.all_reduce(tensor, timeout_s)

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End what is under way in that quorum, or in any; what has completed has completed."""
        with self._lock:
            if self._quorum_id is not None and quorum_id in (None, self._quorum_id):
                self._end(f"quorum {self._quorum_id} was revoked: {reason}")

    def drop(self) -> None:
        """End what is under way, for the peers too; the next quorum meets anew."""
        with self._lock:
            if self._quorum_id is not None:
                self._end("the process group of this quorum was given up")
                self._quorum_id = None

    def _end(self, reason: str) -> None:
        ended: Future[GlooGroup | None] = Future()
        ended.set_exception(RuntimeError(reason))
        met, self._met = self._met, ended
        try:
            met.set_exception(RuntimeError(reason))  # they are still meeting: nobody waits for that any more
        except InvalidStateError:
            if met.exception() is None and (group := met.result()) is not None:
                group.abort()

    def _meet(self, assignment: Assignment, met: "Future[GlooGroup | None]") -> None:
        """On a thread of its own: gloo cannot be told that a peer will never come, so it is left to find out."""
        try:
            group = self._connect(assignment) if assignment.replica_world_size > 1 else None
        except Exception as e:  # noqa: BLE001  it belongs to who waits for the peers
            with contextlib.suppress(InvalidStateError):
                met.set_exception(e)
            return
        try:
            met.set_result(group)
        except InvalidStateError:
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
