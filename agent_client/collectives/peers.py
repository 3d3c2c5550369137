"""The same rank of the other replica groups: one process group, made anew for every quorum."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

import torch
from torch import Tensor

from agent_client.collectives.connectors import connector
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.group_spec import GroupSpec, RankGroup, meeting_name
from lighthouse_protocol.messages.membership import Assignment

log = logging.getLogger(__name__)

STORE_PREFIX = "lighthouse"
MEETING_PARTS = 3
"""A store, a group, and with NCCL a first collective: each has `connect_timeout_s`. gloo takes five times as long."""


class Peers:
    """`host` is the address of this host that the peers can reach, `process_group` one of collectives/connectors.py.

    configure, all_reduce and exchange belong to one thread, revoke and drop are for any.
    """

    def __init__(
        self, group_rank: int, host: str, *, connect_timeout_s: float, timeout_s: float, process_group: str = "gloo"
    ) -> None:
        self._group_rank = group_rank
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._process_group = process_group
        self._connector = connector(process_group)
        self.last_reconfiguration_s = 0.0
        """How long giving up the last group and making the present one took."""
        self._lock = threading.Lock()
        self._quorum_id: int | None = None
        self._place, self._size = 0, 1
        self._met: Future[RankGroup | None] = Future()
        self._meeting: threading.Thread | None = None

    def configure(self, assignment: Assignment, why_revoked: Callable[[], str | None]) -> None:
        """Meet the participants, once a quorum: an unchanged quorum_id costs nothing. Raises RuntimeError if one does
        not come in time, if this quorum's group was given up, and if the quorum is revoked, or was before:
        `why_revoked` says so."""
        if assignment.quorum_id == self._quorum_id:
            self._met.result()
            return
        began_at = time.monotonic()
        self.drop()
        met: Future[RankGroup | None] = Future()
        self._place, self._size = assignment.replica_rank, assignment.replica_world_size
        with self._lock:
            self._quorum_id, self._met = assignment.quorum_id, met
        if (reason := why_revoked()) is not None:
            self.revoke(assignment.quorum_id, reason)
        meeting = threading.Thread(target=self._meet, args=(assignment, met), name="lighthouse peers", daemon=True)
        self._meeting = meeting
        meeting.start()
        limit_s = MEETING_PARTS * self._connect_timeout_s
        try:
            met.result(limit_s)
        except TimeoutError:
            names = ", ".join(assignment.replica_ids)
            raise RuntimeError(f"the participants ({names}) did not connect within {limit_s:g} s") from None
        self.last_reconfiguration_s = took_s = time.monotonic() - began_at
        size, kind = assignment.replica_world_size, self._process_group
        log.info("quorum %d: process group (%s) of %d made in %.3f s", assignment.quorum_id, kind, size, took_s)

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """The sum over the participants, in place. Raises RuntimeError when a peer is lost."""
        if self._quorum_id is None:
            raise RuntimeError("no process group exists before the first quorum")
        if (group := self._met.result()) is not None:
            group.all_reduce(tensor, timeout_s)

    def exchange(self, words: Sequence[int], timeout_s: float) -> list[tuple[int, ...]]:
        """What each participant says, by replica_rank; all say equally many int64. Raises as all_reduce does."""
        row = torch.tensor(words, dtype=torch.int64)
        group = self._met.result() if self._quorum_id is not None else None
        if isinstance(group, GlooGroup):
            table = group.all_gather(row, timeout_s)
        else:
            table = torch.zeros(self._size, len(words), dtype=torch.int64)
            table[self._place] = row
            self.all_reduce(table, timeout_s)
        return [tuple(each) for each in table.tolist()]

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End what is under way in that quorum, or in any; what has completed has completed."""
        with self._lock:
            if self._quorum_id is not None and quorum_id in (None, self._quorum_id):
                self._end(f"quorum {self._quorum_id} was revoked: {reason}")

    def drop(self) -> None:
        """End what is under way, for the peers too. A quorum whose group was given up is not met again: its peers may
        not know yet, and would not come. The next one is met anew."""
        with self._lock:
            if self._quorum_id is not None:
                self._end(f"the process group of quorum {self._quorum_id} was abandoned")

    def close(self) -> None:
        """Drop the group; no other can be made. Who still meets peers is waited for: the interpreter may end next."""
        self.drop()
        if self._meeting is not None:
            self._meeting.join(self._connect_timeout_s)
        self._connector.close()

    def _end(self, reason: str) -> None:
        ended: Future[RankGroup | None] = Future()
        ended.set_exception(RuntimeError(reason))
        met, self._met = self._met, ended
        try:
            met.set_exception(RuntimeError(reason))  # they are still meeting: nobody waits for that any more
        except InvalidStateError:
            if met.exception() is None and (group := met.result()) is not None:
                group.abort()

    def _meet(self, assignment: Assignment, met: "Future[RankGroup | None]") -> None:
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

    def _connect(self, assignment: Assignment) -> RankGroup:
        spec = GroupSpec(
            store_address=assignment.store_address,
            # A script with a client of its own knows no secret: where one takes part, the name is that of the document.
            prefix=meeting_name(
                f"{STORE_PREFIX}/{assignment.quorum_id}/{self._group_rank}",
                assignment.secret if assignment.compares else "",
            ),
            rank=assignment.replica_rank,
            size=assignment.replica_world_size,
            host=self._host,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
        )
        return self._connector.connect(spec)
